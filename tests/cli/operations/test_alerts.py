"""The commands of alerts, as the API answers them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.control.client import ApiClient

PROBES = [
    {"endpoint": "chat", "probe": "tides", "at_s": 1.0, "success": True, "is_right": False, "seconds": 0.25},
    {"endpoint": "code", "probe": "hello", "at_s": 1.0, "success": False, "is_right": False, "error": "no answer"},
]


def test_probes_are_listed_with_their_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(method: str, path: str) -> object:
        assert (method, path) == ("GET", "/v1/probes")
        return PROBES

    monkeypatch.setattr(ApiClient, "find", lambda _: SimpleNamespace(call=call))
    rows = CliRunner().invoke(app, ["alerts", "probes"]).stdout.splitlines()
    assert [row.split("\t") for row in rows[1:]] == [
        ["chat", "tides", "yes", "no", "0.25"],
        ["code", "hello", "no", "no", "-"],
    ]
    assert json.loads(CliRunner().invoke(app, ["alerts", "probes", "--json"]).stdout) == PROBES
