"""The command `raytide bench` on a server of this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.responses import Response
from tests.sdk.bench.load.conftest import Server, server
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.core.errors import ConfigError, EngineError, UsageError

__all__ = ["server"]

runner = CliRunner()
SMALL = ["--model", "m", "-n", "12", "-c", "3", "--prompt-tokens", "4:8", "--output-tokens", "3", "--warmup", "2"]


def test_a_server_anywhere_is_loaded_and_drawn(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTIDE_API_KEY", "rk-secret")
    files = ["--plot", str(tmp_path / "load.html"), "--records", str(tmp_path / "load.jsonl")]
    done = runner.invoke(
        app, ["bench", server.url, *SMALL, *files, "--slo", "ttft=60s", "--body", '{"temperature": 0}']
    )
    assert done.exit_code == 0, done.output
    assert "12 of 12 answered" in done.stdout and "100.0% of all, kept first token 60000 ms" in done.stdout
    assert (tmp_path / "load.html").read_text().startswith("<!doctype html>")
    assert len((tmp_path / "load.jsonl").read_text().splitlines()) == 12
    assert set(server.keys) == {"Bearer rk-secret"}
    assert {body["temperature"] for body in server.bodies} == {0}
    assert "rk-secret" not in done.output + (tmp_path / "load.html").read_text() + (tmp_path / "load.jsonl").read_text()


def test_json_is_all_that_is_printed(server: Server) -> None:
    done = runner.invoke(app, ["bench", server.url, *SMALL, "--json"])
    assert json.loads(done.stdout)["answered"] == 12


def test_options_may_stand_before_the_endpoint(server: Server) -> None:
    assert runner.invoke(app, ["bench", *SMALL, server.url]).exit_code == 0
    assert runner.invoke(app, ["bench", "endpoint", server.url, *SMALL]).exit_code == 0


def test_a_load_that_nothing_answered_fails(server: Server) -> None:
    server.reply = lambda body: Response(status_code=500)
    done = runner.invoke(app, ["bench", server.url, *SMALL, "--warmup", "0"])
    assert done.exit_code == 1 and "12 500" in done.stdout
    assert isinstance(runner.invoke(app, ["bench", server.url, *SMALL]).exception, EngineError)


@pytest.mark.parametrize(
    ("args", "kind", "why"),
    [
        (["http://here/v1"], UsageError, "--model names the model"),
        (["node", "l4", "--write", "cluster.yaml"], UsageError, "--write needs --reference"),
        (["node", "l4", "--reference", "t4", "--write", "/none/cluster.yaml"], UsageError, "there is no file"),
        (["http://here/v1", "--model", "m", "--body", "[]"], UsageError, "--body is no JSON object"),
        (["http://here/v1", "--model", "m", "-c", "1", "-r", "2"], ConfigError, "exclude each other"),
        (["http://here/v1", "--model", "m", "--slo", "fast"], ConfigError, "is no objective"),
    ],
)
def test_what_makes_no_sense_is_refused(args: list[str], kind: type[Exception], why: str) -> None:
    error = runner.invoke(app, ["bench", *args]).exception
    assert isinstance(error, kind) and why in str(error)
