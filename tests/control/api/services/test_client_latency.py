"""Latencies that SDK handles report are added up in the API's metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from tests.control.api.test_tenancy import ANA, BOB, ROOT, client, clock  # noqa: F401

from raytide.sdk.serving import client_latency
from raytide.sdk.serving.client_latency import LatencyReporter


def test_the_api_adds_reports_up_and_refuses_others(client: TestClient, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "config.json").write_text("{}")
    client.post("/v1/endpoints", json={"name": "web", "model": str(tmp_path)}, headers=ANA).raise_for_status()
    sent: list[dict[str, Any]] = []
    reporter = LatencyReporter(sent.append)
    for seconds in (0.02, 0.3, 1e6):
        reporter.observe(client_latency.CLIENT_REQUEST_SECONDS, seconds)
    reporter.flush()
    for _ in range(2):
        assert client.post("/v1/endpoints/web/latency", json=sent[0], headers=ANA).status_code == 200
    page = client.get("/metrics", headers=ROOT).text
    assert 'raytide_client_request_seconds_count{endpoint="web"} 6' in page
    for body, headers, status in (
        (sent[0], BOB, 403),
        ({**sent[0], "requests": [1]}, ANA, 400),
        ({**sent[0], "requests_s": -1}, ANA, 400),
    ):
        assert client.post("/v1/endpoints/web/latency", json=body, headers=headers).status_code == status
    assert client.post("/v1/endpoints/none/latency", json=sent[0], headers=ANA).status_code == 404
