"""The real API over a real store, in the test's own event loop, with a line that can be cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.control.api.test_routes import LOCAL, Echo
from tests.control.conftest import NoMachines
from tests.stores import new_store

from raytide.control.api.auth import Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.service import ApiService
from raytide.core.clock import SystemClock
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.state import Store
from raytide.gateway.tenancy.control_api import ControlApi


class Line(httpx.AsyncBaseTransport):
    """The way to the API. While it is cut, calls fail: before they arrive, or with `answers_lost` after that, if their
    path begins with `lost_path`."""

    def __init__(self, store: Store, folder: Path) -> None:
        (folder / "tokens.json").write_text(json.dumps({"gateway": {"role": "gateway"}}))
        service = ApiService(
            store=store,
            config=load_cluster(LOCAL),
            bill=NoMachines(),
            drivers=Echo(),  # type: ignore[arg-type]
            clock=SystemClock(),
            live=folder / "live.json",
            serve_url="",
            ray_url="",
            ray_environment={},
        )
        self.app = create_app(service, Tokens(folder / "tokens.json"))
        self._transport = httpx.ASGITransport(self.app)
        self.is_cut = self.answers_lost = False
        self.lost_path = "/"
        self.calls: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.is_cut:
            raise httpx.ConnectError("the line is cut")
        self.calls.append(request.url.path)
        answer = await self._transport.handle_async_request(request)
        if self.answers_lost and request.method == "POST" and request.url.path.startswith(self.lost_path):
            raise httpx.ReadError("the answer is lost")
        return answer

    def api(self, gateway: str = "g1") -> ControlApi:
        return ControlApi("http://api", "gateway", gateway, transport=self)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = new_store(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def line(store: Store, tmp_path: Path) -> Line:
    return Line(store, tmp_path)


@pytest.fixture
def secret_of(store: Store) -> Callable[..., str]:
    """Makes a key of these fields and returns its secret."""
    from raytide.core.objects.api_key import KeySpec, digest_of_secret, new_secret

    def make(**fields: object) -> str:
        secret = new_secret()
        store.tenancy.keys.create(
            KeySpec.model_validate({"name": "web", **fields}), "ana", digest_of_secret(secret), 1.0
        )
        return secret

    return make
