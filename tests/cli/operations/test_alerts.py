"""The commands of alerts, as the API answers them."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.control.client import ApiClient
from raytide.dashboards.monitor.probes import ProbeResult

RESULTS = (  # as the monitor writes them
    ProbeResult("chat", "tides", 1.0, success=True, right=True, seconds=0.25),
    ProbeResult("chat", "winds", 1.0, success=True, right=False, seconds=0.5),
    ProbeResult("code", "hello", 1.0, success=False, right=False, seconds=9.0, error="no answer"),
)
PROBES = [asdict(result) for result in RESULTS]


def test_probes_are_listed_with_their_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(method: str, path: str) -> object:
        assert (method, path) == ("GET", "/v1/probes")
        return PROBES

    monkeypatch.setattr(ApiClient, "find", lambda _: SimpleNamespace(call=call))
    rows = CliRunner().invoke(app, ["alerts", "probes"]).stdout.splitlines()
    assert [row.split("\t") for row in rows[1:]] == [
        ["chat", "tides", "yes", "yes", "0.25"],
        ["chat", "winds", "yes", "no", "0.50"],
        ["code", "hello", "no", "no", "9.00"],
    ]
    assert json.loads(CliRunner().invoke(app, ["alerts", "probes", "--json"]).stdout) == PROBES
