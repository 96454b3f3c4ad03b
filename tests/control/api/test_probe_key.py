"""The key of probes is made once, kept where only raytide's user reads it, and made anew when it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi.testclient import TestClient
from tests.control.api.test_tenancy import ROOT, client, clock  # noqa: F401

from raytide.control.views import KeyView, from_json
from raytide.core.errors import ClusterError, NotFoundError
from raytide.core.telemetry.settings import ProbeSection
from raytide.dashboards.monitor import probes
from raytide.dashboards.monitor.probes import FILE, ProbeKey, Prober


@pytest.fixture
def keys(client: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:  # noqa: F811
    """The folder of a cluster whose API is that of the test."""

    def call(method: str, path: str, body: object = None, query: dict[str, str] | None = None) -> object:
        return client.request(method, path, json=body, params=query, headers=ROOT).raise_for_status().json()

    def key(key_id: str) -> KeyView:
        response = client.get(f"/v1/keys/{key_id}", headers=ROOT)
        if response.status_code == 404:
            raise NotFoundError("gone.", hint="Make one.")
        return from_json(KeyView, response.raise_for_status().json())

    monkeypatch.setattr(probes.ApiClient, "from_run_dir", lambda folder: SimpleNamespace(call=call, key=key))
    return tmp_path


def revoke(client: TestClient) -> None:  # noqa: F811
    (key,) = client.get("/v1/keys", headers=ROOT).json()
    client.post(f"/v1/keys/{key['key']['id']}/revoke", headers=ROOT).raise_for_status()


async def test_one_key_is_made_and_used_again_by_the_next_monitor(keys: Path, client: TestClient) -> None:  # noqa: F811
    first = ProbeKey(keys, "research", is_needed=True)
    secret = await first()
    assert secret.startswith("rk-")
    assert await first() == secret == await ProbeKey(keys, "research", is_needed=True)()
    (key,) = client.get("/v1/keys", headers=ROOT).json()
    assert (key["key"]["name"], key["key"]["team"]) == (probes.NAME, "research")
    assert (keys / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["revoked", "unknown", "gone", "not JSON"])
async def test_a_key_that_has_ended_is_replaced(keys: Path, client: TestClient, damage: str) -> None:  # noqa: F811
    before = await ProbeKey(keys, "research", is_needed=True)()
    if damage == "revoked":
        revoke(client)
    elif damage == "unknown":
        (keys / FILE).write_text(json.dumps({"id": "key-99", "secret": before}))
    elif damage == "gone":
        (keys / FILE).unlink()
    else:
        (keys / FILE).write_text("{")
    after = await ProbeKey(keys, "research", is_needed=True)()
    assert after.startswith("rk-")
    assert after != before


async def test_a_key_that_ends_while_the_monitor_runs_is_replaced(keys: Path, client: TestClient) -> None:  # noqa: F811
    key = ProbeKey(keys, "research", is_needed=True)
    before = await key()
    key.forget(before)
    assert await key() == before, "it is still valid"
    revoke(client)

    def answer(request: httpx.Request) -> httpx.Response:
        is_valid = request.headers["Authorization"] != f"Bearer {before}"
        return httpx.Response(200 if is_valid else 401, json={"choices": [{"message": {"content": "the moon"}}]})

    section = ProbeSection.parse({"endpoint": "chat", "prompt": "What causes tides?"}, where="probe")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        prober = Prober([section], "http://gateway", http, key, keys)
        assert [(await prober.send(section)).success for _ in range(2)] == [False, True]


async def test_without_need_or_api_there_is_none(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ProbeKey(keys, "research", is_needed=False)() == ""

    def away(folder: Path) -> None:
        raise ClusterError("the API does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(probes.ApiClient, "from_run_dir", away)
        assert await (waiting := ProbeKey(keys, "research", is_needed=True))() == ""
    assert (await waiting()).startswith("rk-"), "the next probe tries again"
