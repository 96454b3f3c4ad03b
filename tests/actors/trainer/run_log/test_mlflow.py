"""Metrics reach an MLflow server over HTTP, late and through deaths of the driver and of the server."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from botocore.exceptions import EndpointConnectionError

from raytide.actors.trainer.run_log import mlflow
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.types import StepResult
from raytide.core.clock import VirtualClock
from raytide.core.errors import ConfigError, StorageError
from raytide.core.specs.train import MlflowSpec, TrainSpec


class Server(ThreadingHTTPServer):
    """As much of MLflow's tracking server as is spoken to, with its answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.away = False
        self.is_behind_proxy = False
        """True if a proxy answers everything with a page."""
        self.tokens: set[str | None] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, what: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.away:
            return 503, {"error_code": "TEMPORARILY_UNAVAILABLE"}
        if what == "experiments/get-by-name":
            number = self.experiments.get(body["experiment_name"])
            if number is None:
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST"}
            return 200, {"experiment": {"experiment_id": number}}
        if what == "experiments/create":
            self.experiments[body["name"]] = str(len(self.experiments) + 1)
            return 200, {"experiment_id": self.experiments[body["name"]]}
        if what == "runs/create":
            run_id = f"run-{len(self.runs) + 1}"
            self.runs[run_id] = {"name": body["run_name"], "status": "RUNNING", "metrics": [], "params": {}}
            return 200, {"run": {"info": {"run_id": run_id}}}
        run = self.runs[body["run_id"]]
        if what == "runs/log-batch":
            if len(body.get("metrics", [])) > 1000 or len(body.get("params", [])) > 100:
                return 400, {"error_code": "INVALID_PARAMETER_VALUE"}
            run["metrics"] += [(each["key"], each["step"], each["value"]) for each in body.get("metrics", [])]
            run["params"] |= {each["key"]: each["value"] for each in body.get("params", [])}
            return 200, {}
        assert what == "runs/update"
        run["status"] = body["status"]
        return 200, {"run_info": {}}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer({key: values[0] for key, values in parse_qs(urlparse(self.path).query).items()})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        self.server.tokens.add(self.headers["Authorization"])
        if self.server.is_behind_proxy:
            self._send(200, b"<html>Sign in</html>")
            return
        status, found = self.server.answer(urlparse(self.path).path.removeprefix("/api/2.0/mlflow/"), body)
        self._send(status, json.dumps(found).encode())

    def _send(self, status: int, payload: bytes) -> None:
        self.send_response(status)
        if status == 307:
            self.send_header("Location", "http://127.0.0.1:1/")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the test's output is not a server's log."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def tracked(server: Server, tmp_path: Path) -> TrainSpec:
    return TrainSpec(
        name="tracked",
        dataset="none",
        out=str(tmp_path / "run"),
        steps=300,
        mlflow=MlflowSpec(tracking_uri=server.address),
    )


def step(number: int) -> StepResult:
    return StepResult(number, 3.0 / number, 1e-3, 0.5, 64, 0.5, 0.0, world=2, times={"data": 0.25})


def record_of(spec: TrainSpec) -> RunLog:
    return RunLog(spec, VirtualClock(1000.0))


def losses(server: Server, run_id: str = "run-1") -> dict[int, float]:
    return {at: value for key, at, value in server.runs[run_id]["metrics"] if key == "loss"}


def test_all_steps_and_the_spec_arrive_and_the_run_is_finished(
    server: Server, tracked: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYTIDE_MLFLOW_TOKEN", "secret")
    monkeypatch.setenv("RAYTIDE_MLFLOW_URI", server.address)
    record = record_of(tracked)
    for number in range(1, 101):  # more than one request may carry
        record.step(step(number))
    record.close("done")
    (run,) = server.runs.values()
    assert losses(server) == {number: 3.0 / number for number in range(1, 101)}
    assert ("times/data", 7, 0.25) in run["metrics"] and ("tokens_per_s", 7, 128.0) in run["metrics"]
    assert (run["name"], run["status"]) == ("tracked", "FINISHED")
    assert (run["params"]["optim.lr"], run["params"]["steps"]) == ("0.0003", "300")
    assert server.tokens == {"Bearer secret"}
    assert not (Path(tracked.out) / "events.jsonl").exists()


@pytest.mark.parametrize(
    "own",
    ["https://mlflow.example", "http://127.0.0.1:1", "http://127.0.0.1@mlflow.example", "https://127.0.0.1:{port}"],
)
def test_the_operators_token_goes_to_the_operators_server_alone(
    server: Server, tracked: TrainSpec, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    monkeypatch.setenv("RAYTIDE_MLFLOW_TOKEN", "secret")
    monkeypatch.setenv("RAYTIDE_MLFLOW_URI", own.format(port=server.server_port))
    record_of(tracked).close("done")
    assert server.tokens == {None}


def test_a_token_for_no_server_names_what_to_set(tracked: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTIDE_MLFLOW_TOKEN", "secret")
    monkeypatch.delenv("RAYTIDE_MLFLOW_URI", raising=False)
    with pytest.raises(ConfigError) as refused:
        record_of(tracked)
    assert "RAYTIDE_MLFLOW_URI" in refused.value.hint


def test_a_redirect_is_not_followed(server: Server, tracked: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "answer", lambda path, body: (307, {}))
    with pytest.raises(StorageError, match="307"):
        record_of(tracked)


def test_the_next_driver_goes_on_in_the_same_run_and_sends_what_was_left(server: Server, tracked: TrainSpec) -> None:
    first = record_of(tracked)
    first.step(step(1))
    first.close("failed", "killed")
    assert server.runs["run-1"]["status"] == "FAILED"

    server.away = True
    second = record_of(tracked)  # it has a run already: no reason to fail
    second.step(step(2))
    second.close("failed", "killed again")
    events = (Path(tracked.out) / "events.jsonl").read_text()
    assert "503" in events and "did not take" in events

    server.away = False
    third = record_of(tracked)
    third.step(step(3))
    third.close("done")
    assert list(server.runs) == ["run-1"]
    assert losses(server) == {1: 3.0, 2: 1.5, 3: 1.0}
    assert server.runs["run-1"]["status"] == "FINISHED"


def test_lines_that_a_proxy_took_are_reported_and_sent_later(server: Server, tracked: TrainSpec) -> None:
    record_of(tracked).close("failed", "killed")
    server.is_behind_proxy = True
    second = record_of(tracked)
    second.step(step(1))
    second.close("failed", "killed again")
    assert "the answer is not JSON" in (Path(tracked.out) / "events.jsonl").read_text()

    server.is_behind_proxy = False
    record_of(tracked).close("done")
    assert (losses(server)[1], server.runs["run-1"]["status"]) == (3.0, "FINISHED")


def test_an_experiment_that_another_run_creates_meanwhile_is_used(
    server: Server, tracked: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials of a sweep begin together, and none of them finds the experiment."""
    answer = server.answer

    def raced(what: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if what == "experiments/create":
            server.experiments[body["name"]] = "7"
            return 400, {"error_code": "RESOURCE_ALREADY_EXISTS"}
        return answer(what, body)

    monkeypatch.setattr(server, "answer", raced)
    record = record_of(tracked)
    record.step(step(1))
    record.close("done")
    assert losses(server) == {1: 3.0}


def test_a_server_that_is_not_there_is_named_before_anything_is_trained(tracked: TrainSpec) -> None:
    absent = tracked.model_copy(update={"mlflow": MlflowSpec(tracking_uri="http://127.0.0.1:9")})
    with pytest.raises(StorageError, match=r"MLflow at http://127.0.0.1:9 did not take experiments/get-by-name"):
        record_of(absent)


def test_what_is_no_server_s_address_and_a_machine_without_httpx_are_refused(
    tracked: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="tracking_uri"):
        MlflowSpec.parse({"tracking_uri": "sqlite:///runs.db"}, where="mlflow")
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match="httpx is not installed"):
        mlflow.MlflowRun(tracked, MlflowSpec(tracking_uri="http://127.0.0.1:9"), VirtualClock(0.0))


def test_a_store_that_is_away_for_a_while_ends_no_sending(
    server: Server, tracked: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, errors = mlflow.open_url, [EndpointConnectionError(endpoint_url="https://s3")]
    has_failed = threading.Event()

    def open_url(url: str) -> Any:
        if errors:
            has_failed.set()
            raise errors.pop()
        return opened(url)

    monkeypatch.setattr(mlflow, "open_url", open_url)
    record = record_of(tracked)
    record.step(step(1))
    assert has_failed.wait(60.0)
    record.close("done")
    assert losses(server) == {1: 3.0}
    assert server.runs["run-1"]["status"] == "FINISHED"
