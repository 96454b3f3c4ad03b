"""An API over a real store, as the page finds it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from tests.control.conftest import NoMachines
from tests.stores import new_store

from raytide.control.api.auth import Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.service import ApiService
from raytide.core.clock import VirtualClock
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.state import Store

LOCAL = Path(__file__).parents[3] / "platform" / "raytide" / "control" / "bootstrap" / "local.yaml"
TOKENS = {
    "secret": {"user": "ana", "team": "default"},
    "other": {"user": "bob", "team": "research"},
    "root": {"user": "root", "team": "*"},
}


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100_000.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = new_store(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def service(tmp_path: Path, store: Store, clock: VirtualClock) -> ApiService:
    return ApiService(
        store=store,
        config=load_cluster(LOCAL),
        bill=NoMachines(),
        drivers=None,  # type: ignore[arg-type]
        clock=clock,
        live=tmp_path / "live.json",
        serve_url="http://127.0.9.1:8000",
        ray_url="http://127.0.9.1:8265",
        ray_environment={},
    )


@pytest.fixture
def client(tmp_path: Path, service: ApiService) -> Iterator[TestClient]:
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    with TestClient(create_app(service, Tokens(tmp_path / "tokens.json"))) as client:
        client.headers["Authorization"] = "Bearer root"
        yield client
