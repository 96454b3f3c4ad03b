"""Values that endpoints scale on are reported over the API, and reach the controller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from tests.control.api.test_tenancy import ANA, BOB, ROOT, client, clock  # noqa: F401

from raytide.core.objects.node import Signal
from raytide.core.state import Store


@pytest.fixture
def web(client: TestClient, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "config.json").write_text("{}")
    signals = [{"name": "queue", "target": 10}, {"name": "gpu", "target": 0.5}]
    body = {"name": "web", "model": str(tmp_path), "replicas": {"max": 4, "scale_on": signals}}
    assert client.post("/v1/endpoints", json=body, headers=ANA).status_code == 200


@pytest.mark.usefixtures("web")
def test_the_last_report_is_what_the_controller_reads(client: TestClient, store: Store) -> None:  # noqa: F811
    for value in (5, 12.5):
        assert client.post("/v1/endpoints/web/signals", json={"queue": value}, headers=ANA).status_code == 200
    ((key, signal),) = store.load().signals.items()
    assert key == ("web", "queue")
    assert isinstance(signal, Signal)
    assert signal.value == 12.5


@pytest.mark.usefixtures("web")
@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        ({"other": 1}, ANA, 404, "does not scale on other"),
        ({"gpu": 1}, ANA, 404, "It scales on queue"),
        ({"queue": -1}, ANA, 400, "queue"),
        ({"queue": "x"}, ANA, 400, "queue"),
        ({}, ANA, 400, "values"),
        ({"queue": 1}, BOB, 403, "team"),
    ],
)
def test_what_it_does_not_scale_on_is_refused(
    client: TestClient,  # noqa: F811
    store: Store,
    body: dict[str, object],
    headers: dict[str, str],
    status: int,
    says: str,
) -> None:
    answer = client.post("/v1/endpoints/web/signals", json=body, headers=headers)
    assert (answer.status_code, says in json.dumps(answer.json())) == (status, True), answer.json()
    assert store.load().signals == {}
