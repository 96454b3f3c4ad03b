"""Sends `metrics.jsonl` to an MLflow server. A background thread sends it, so that a slow or missing server never
delays the run.

The position in the file is stored beside the metrics. A restarted driver therefore continues the same MLflow run and
sends the missing lines. Lines may be sent twice. They are lost only if the server cannot be reached at the end. The
module uses MLflow's REST API, because MLflow's Python package does not work with the versions of packages that raytide
needs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from raytide.actors.trainer.types import scalar_metrics
from raytide.core.clock import Clock
from raytide.core.config import environment
from raytide.core.errors import ConfigError, NotFoundError, StorageError
from raytide.core.io.storage import cloud_failures, exists, join, open_url, read_bytes, write_bytes
from raytide.core.specs.train import MlflowSpec, TrainSpec

if TYPE_CHECKING:
    import httpx

EVERY_S = 2.0
CLOSE_S = 30.0
TIMEOUT_S = 10.0
LINES = 40
"""The number of lines per request: MLflow accepts at most 1000 metrics."""
PARAMS = 100
PARAM_CHARS = 500
STATE = "mlflow.json"


class MlflowRun:
    def __init__(self, spec: TrainSpec, target: MlflowSpec, clock: Clock) -> None:
        """Continues the run recorded in `out`, or creates one, for which the server must be reachable."""
        self.metrics, self.state = join(spec.out, "metrics.jsonl"), join(spec.out, STATE)
        self.target, self.clock = target, clock
        self._http = _client(target)
        self._sent, self._failure = 0, ""
        resumed = exists(self.state)
        if resumed:
            body = json.loads(read_bytes(self.state))
            self.run_id, self._sent = str(body["run_id"]), int(body["sent"])
        else:
            self.run_id = self._create_run(spec)
            self._save_position()
        self._final_status: Literal["", "FINISHED", "FAILED"] = ""
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._send_loop, args=(resumed,), name="mlflow", daemon=True)
        self._thread.start()

    def close(self, *, done: bool) -> str:
        """Sends the remaining lines and ends the MLflow run. Returns a description of what failed, or an empty string
        if nothing failed.
        """
        self._final_status = "FINISHED" if done else "FAILED"
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            return f"MLflow at {self.target.tracking_uri} did not take everything within {CLOSE_S:g} s"
        self._http.close()
        return self._failure

    def _create_run(self, spec: TrainSpec) -> str:
        experiment = self._find_experiment() or self._create_experiment()
        began_ms = round(self.clock.now_s() * 1000)
        run = self._call("POST", "runs/create", experiment_id=experiment, run_name=spec.name, start_time=began_ms)
        run_id = str(run["run"]["info"]["run_id"])
        params = list(_flat(spec.model_dump(mode="json")))
        for first in range(0, len(params), PARAMS):
            self._call("POST", "runs/log-batch", run_id=run_id, params=params[first : first + PARAMS])
        return run_id

    def _find_experiment(self) -> str:
        """Returns the id of the experiment; empty if there is none."""
        try:
            found = self._call("GET", "experiments/get-by-name", experiment_name=self.target.experiment)
        except NotFoundError:
            return ""
        return str(found["experiment"]["experiment_id"])

    def _create_experiment(self) -> str:
        try:
            return str(self._call("POST", "experiments/create", name=self.target.experiment)["experiment_id"])
        except StorageError:  # another run, as of the same sweep, may just have created it
            if experiment := self._find_experiment():
                return experiment
            raise

    def _send_loop(self, resumed: bool) -> None:
        while True:
            over = self._final_status  # read first, because all lines are written before it is set
            try:
                if resumed:
                    self._update("RUNNING")
                    resumed = False
                while self._send():
                    pass
                if over:
                    self._update(over)
                self._failure = ""
            except (StorageError, NotFoundError, OSError) as error:
                self._failure = str(error)
            if over:
                return
            self._wake.wait(EVERY_S)

    def _update(self, status: str) -> None:
        ended = {} if status == "RUNNING" else {"end_time": round(self.clock.now_s() * 1000)}
        self._call("POST", "runs/update", run_id=self.run_id, status=status, **ended)

    def _send(self) -> bool:
        """Sends some of the pending lines. Returns False if there were none."""
        with cloud_failures(self.metrics):
            fs, path = open_url(self.metrics)
            fs.invalidate_cache()
            if not fs.exists(path) or fs.size(path) <= self._sent:
                return False
            with fs.open(path, "rb") as file:
                file.seek(self._sent)
                lines = [line for _, line in zip(range(LINES), file, strict=False) if line.endswith(b"\n")]
        if not lines:
            return False
        found = [
            {"key": key, "value": value, "timestamp": round(line["at_s"] * 1000), "step": line["step"]}
            for line in map(json.loads, lines)
            for key, value in scalar_metrics(line).items()
        ]
        self._call("POST", "runs/log-batch", run_id=self.run_id, metrics=found)
        self._sent += sum(map(len, lines))
        self._save_position()
        return True

    def _save_position(self) -> None:
        write_bytes(self.state, f"{json.dumps({'run_id': self.run_id, 'sent': self._sent})}\n".encode())

    def _call(self, method: Literal["GET", "POST"], what: str, **fields: object) -> dict[str, Any]:
        """Calls the API. Raises NotFoundError if MLflow lacks the object, and StorageError for other failures."""
        import httpx

        body: dict[str, Any] = {"params": fields} if method == "GET" else {"json": fields}
        try:
            answer = self._http.request(method, f"api/2.0/mlflow/{what}", **body)
        except httpx.HTTPError as error:
            raise self._error(what, str(error)) from None
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise NotFoundError(f"MLflow at {self.target.tracking_uri} does not know what {what} asks for.")
        if not answer.is_success:
            details = f"{answer.status_code} {answer.text[:300]}"
            if answer.status_code in (401, 403) and environment("MLFLOW_TOKEN") and not _credentials(self.target):
                details += f"; RAYTIDE_MLFLOW_TOKEN is only for {environment('MLFLOW_URI')}"
            raise self._error(what, details)
        try:
            found: dict[str, Any] = answer.json()
        except ValueError:  # a proxy's page, for example
            raise self._error(what, "the answer is not JSON") from None
        return found

    def _error(self, what: str, why: str) -> StorageError:
        return StorageError(
            f"MLflow at {self.target.tracking_uri} did not take {what}: {why}.",
            hint="Check mlflow.tracking_uri, or remove mlflow from the spec: metrics.jsonl is always written.",
        )


def _client(target: MlflowSpec) -> httpx.Client:
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(
            f"the spec sets mlflow, but {error.name} is not installed.",
            hint="Install it, or remove mlflow from the spec: metrics.jsonl is always written.",
        ) from None
    try:
        headers = _credentials(target)
        # A redirect could send the token elsewhere, or hide that nothing was written.
        return httpx.Client(base_url=target.tracking_uri, headers=headers, timeout=TIMEOUT_S, follow_redirects=False)
    except httpx.InvalidURL as error:
        raise ConfigError(f"mlflow: {error}.", hint="Check mlflow.tracking_uri, and RAYTIDE_MLFLOW_URI.") from None


def _credentials(target: MlflowSpec) -> dict[str, str]:
    """Returns the header with the operator's token if `tracking_uri` is the operator's server. Any other `tracking_uri`
    gets no token, because a job's user can set it.
    """
    import httpx

    token, operator_uri = environment("MLFLOW_TOKEN"), environment("MLFLOW_URI")
    if not token:
        return {}
    if not operator_uri:
        raise ConfigError(
            "RAYTIDE_MLFLOW_TOKEN is set, but RAYTIDE_MLFLOW_URI, the server that it is for, is not.",
            hint="Set RAYTIDE_MLFLOW_URI where the cluster is started.",
        )
    is_own = _origin(httpx.URL(operator_uri)) == _origin(httpx.URL(target.tracking_uri))
    return {"Authorization": f"Bearer {token}"} if is_own else {}


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    """Returns the scheme, host and port of a URL. With the scheme, a token for https is never sent over http."""
    return url.scheme, url.host.lower().rstrip("."), url.port or {"http": 80, "https": 443}.get(url.scheme)


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[dict[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield {"key": above + key, "value": str(value)[:PARAM_CHARS]}
