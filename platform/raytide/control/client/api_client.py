"""The HTTP client of the API, for the SDK, the CLI and drivers. It implements LeaseClient, through which the driver of
a gang follows its lease."""

from __future__ import annotations

import http.client
import json
import random
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from raytide.control.client.connections import HttpConnections
from raytide.control.job_tokens import key_in, token_of
from raytide.control.views import (
    ClusterStatus,
    CostReport,
    CostTable,
    EndpointStatus,
    JobView,
    KeyView,
    LogPart,
    NewKey,
    RolloutStatus,
    TeamView,
    UsagePage,
    WhyView,
    from_json,
)
from raytide.core import errors
from raytide.core.bounds import reportable
from raytide.core.config import environment, home
from raytide.core.errors import ClusterError, ConfigError, NotFoundError, StorageError
from raytide.core.objects.api_key import AuditEntry, ChainVerdict, KeySpec, UsageBy, UsageSum
from raytide.core.objects.endpoint import EndpointRevision, ServeSpec
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import BudgetPer, JobSpec
from raytide.core.objects.snapshot import Snapshot
from raytide.core.objects.team import TeamSpec
from raytide.core.specs.live_changes import AdapterChange, WeightsChange
from raytide.core.specs.model_version import (
    AliasChange,
    AliasSpec,
    ModelReference,
    ModelVersion,
    ModelVersionSpec,
    RegisteredModel,
)
from raytide.core.specs.rollout import RevisionFeedback
from raytide.ledger.report import By
from raytide.sizing.calibration import Corrections

_TIMEOUT_S = 15.0
_UPLOAD_TIMEOUT_S = 300.0
_AWAY_S = 10.0
"""The time for which writes are retried, in seconds, because an API that was killed is back soon."""
_READ_AWAY_S = 1.5
"""The time for which reads are retried, in seconds."""


class ApiClient:
    """A client of one cluster. Its methods raise the errors that the API returns."""

    def __init__(self, address: str, token: str) -> None:
        """Raises ConfigError if the address is not an HTTP address, or if the token cannot be sent in a header."""
        if not (token.isascii() and token.isprintable()):
            raise ConfigError("the token has characters that no token has.", hint="Check RAYTIDE_TOKEN.")
        self.address = address
        self._token = token
        self._http = HttpConnections(address, {"Authorization": f"Bearer {token}"})

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles as address and token, so that another process opens its own connection."""
        return ApiClient, (self.address, self._token)

    @classmethod
    def from_run_dir(cls, run_dir: Path | str) -> ApiClient:
        """Returns the client of the cluster with this run folder."""
        try:
            file = json.loads((Path(run_dir) / "client.json").read_text())
        except OSError:
            named = "" if Path(run_dir).name == "local" else f" --name {Path(run_dir).name}"
            raise NotFoundError(
                f"no cluster runs from {run_dir}.", hint=f"Start one: `raytide up --local{named}`."
            ) from None
        return cls(file["address"], file["token"])

    @classmethod
    def of_job(cls, run_dir: Path | str, job_id: str) -> ApiClient:
        """Returns a client for the managed driver of this job. The client has the job's rights (docs/security.md) until
        the job is over.

        Reads the cluster's key for job tokens, which only raytide's own user can read."""
        folder = Path(run_dir)
        record = json.loads((folder / "cluster.json").read_text())
        return cls(record["api_url"], token_of(job_id, key_in(folder)))

    @property
    def access(self) -> dict[str, str]:
        """Environment variables with which `ApiClient.find` returns a client with the same rights."""
        return {"RAYTIDE_API": self.address, "RAYTIDE_TOKEN": self._token}

    @classmethod
    def find(cls, name: str | None = None) -> ApiClient:
        """Returns a client for RAYTIDE_API and RAYTIDE_TOKEN if both are set and no `name` is given. Otherwise returns
        the client of the local cluster `name`."""
        address, token = environment("API"), environment("TOKEN")
        if address and token and name is None:
            return cls(address, token)
        return cls.from_run_dir(home() / "clusters" / (name or environment("CLUSTER_NAME") or "local"))

    def status(self) -> ClusterStatus:
        return from_json(ClusterStatus, self._get("/v1/status"))

    def submit(self, spec: JobSpec, *, key: str | None = None) -> JobView:
        """Queues a job and returns its view. Repeating the call with the same `key` does not queue another job."""
        return from_json(JobView, self._post("/v1/jobs", _to_body(spec), {"key": key or secrets.token_hex(8)}))

    def upload(self, package: bytes) -> str:
        """Uploads a packed working directory and returns its digest. Specs of later jobs can refer to the package by
        this digest."""
        from raytide.core.io.working_dir import digest_of

        digest = digest_of(package)
        self._respond("PUT", f"/v1/packages/{digest}", None, package, patience_s=_AWAY_S, timeout_s=_UPLOAD_TIMEOUT_S)
        return digest

    def package(self, digest: str) -> bytes:
        with _cluster_storage():
            return self._respond("GET", f"/v1/packages/{digest}", patience_s=_AWAY_S, timeout_s=_UPLOAD_TIMEOUT_S)

    def jobs(self, *, limit: int = 100, offset: int = 0, active: bool = False) -> list[JobView]:
        """Returns jobs, newest first. With `active`, returns only unfinished jobs."""
        query = {"limit": limit, "offset": offset, "active": active}
        return from_json(list[JobView], self._get("/v1/jobs", query))

    def job(self, job_id: str) -> JobView:
        return from_json(JobView, self._get(f"/v1/jobs/{job_id}"))

    def stop(self, job_id: str) -> JobView:
        return from_json(JobView, self._post(f"/v1/jobs/{job_id}/stop"))

    def retry(self, job_id: str, *, key: str | None = None) -> JobView:
        """Submits the spec of this job again, as a new job."""
        query = {"key": key or secrets.token_hex(8)}
        return from_json(JobView, self._post(f"/v1/jobs/{job_id}/retry", query=query))

    def why(self, job_id: str) -> WhyView:
        return from_json(WhyView, self._get(f"/v1/jobs/{job_id}/why"))

    def set_job_budget(self, job_id: str, usd: float | None, *, soft: bool = False, per: BudgetPer = "job") -> JobView:
        """Sets the most dollars that the job may cost, in total or per month. None removes the limit. Above a `soft`
        budget the job gets spot nodes only."""
        query = {"soft": soft} if usd is None else {"usd": usd, "soft": soft, "per": per}
        return from_json(JobView, self._write("PUT", f"/v1/jobs/{job_id}/budget", query=query))

    def log_part(self, job_id: str, *, after: str = "", tail: int | None = None) -> LogPart:
        """Returns at most a megabyte of the driver's output: from the position `after` on, or the last `tail` lines."""
        where = {"after": after} if tail is None else {"tail": tail}
        return from_json(LogPart, self._get(f"/v1/jobs/{job_id}/logs", where))

    def lease(self, job_id: str) -> Lease:
        return self.wait_lease(job_id, newer_than=-1, timeout_s=0)

    def wait_lease(self, job_id: str, *, newer_than: int, timeout_s: float) -> Lease:
        query = {"newer_than": newer_than, "timeout_s": timeout_s}
        return from_json(Lease, self._get(f"/v1/jobs/{job_id}/lease", query, timeout_s=timeout_s + _TIMEOUT_S))

    def report(self, job_id: str, progress: Mapping[str, float | int | str]) -> None:
        self._post(f"/v1/jobs/{job_id}/report", {name: reportable(value) for name, value in progress.items()})

    def release(self, job_id: str, *, error: str = "") -> None:
        self._post(f"/v1/jobs/{job_id}/release", {"error": reportable(error)})

    def serve(self, spec: ServeSpec) -> EndpointStatus:
        return from_json(EndpointStatus, self._post("/v1/endpoints", _to_body(spec)))

    def endpoints(self) -> list[EndpointStatus]:
        return from_json(list[EndpointStatus], self._get("/v1/endpoints"))

    def endpoint(self, name: str) -> EndpointStatus:
        return from_json(EndpointStatus, self._get(f"/v1/endpoints/{name}"))

    def delete_endpoint(self, name: str) -> EndpointStatus:
        return from_json(EndpointStatus, self._write("DELETE", f"/v1/endpoints/{name}"))

    def change_weights(self, name: str, change: WeightsChange) -> EndpointStatus:
        """Requests that the replicas of an endpoint swap to other weights, and returns the endpoint's status."""
        return from_json(EndpointStatus, self._post(f"/v1/endpoints/{name}/weights", change.model_dump()))

    def change_adapters(self, name: str, change: AdapterChange) -> EndpointStatus:
        """Loads and unloads adapters of a running endpoint."""
        return from_json(EndpointStatus, self._post(f"/v1/endpoints/{name}/adapters", _to_body(change)))

    def revisions(self, name: str) -> list[EndpointRevision]:
        """Returns the revisions of an endpoint, newest first."""
        return from_json(list[EndpointRevision], self._get(f"/v1/endpoints/{name}/revisions"))

    def roll_back(self, name: str, revision: int | None = None) -> EndpointStatus:
        """Gives an endpoint the spec of an earlier revision. The default is the revision that served before the present
        one."""
        if revision is None:  # the request may be repeated, and must then mean the same
            revision = self.endpoint(name).previous
            if revision == 0:
                raise NotFoundError(f"endpoint {name} has no earlier revision.", hint="Serve another model.")
        return from_json(EndpointStatus, self._post(f"/v1/endpoints/{name}/rollback", query={"revision": revision}))

    def start_rollout(self, spec: ServeSpec, rollout: Mapping[str, Any], why: str = "") -> RolloutStatus:
        """Starts a rollout: a new revision runs beside the revision that serves. Returns the rollout's status.
        `rollout` is a RolloutSpec as JSON."""
        body = {"spec": _to_body(spec), "rollout": rollout, "why": why}
        return from_json(RolloutStatus, self._post("/v1/rollouts", body))

    def rollouts(self, name: str, limit: int = 100) -> list[RolloutStatus]:
        """Returns the rollouts of an endpoint, newest first."""
        return from_json(list[RolloutStatus], self._get(f"/v1/endpoints/{name}/rollouts", {"limit": limit}))

    def end_rollout(self, name: str, end: Literal["stop", "promote"], why: str = "") -> RolloutStatus:
        """Requests the end of the running rollout: "stop" keeps the old revision, "promote" keeps the new one."""
        query = {"why": why or None}
        return from_json(RolloutStatus, self._post(f"/v1/endpoints/{name}/rollout/{end}", query=query))

    def feedback(self, name: str) -> list[RevisionFeedback]:
        """Returns the users' judgements of an endpoint's answers for each revision, newest revision first."""
        return from_json(list[RevisionFeedback], self._get(f"/v1/endpoints/{name}/feedback"))

    def register_model(self, spec: ModelVersionSpec) -> ModelVersion:
        """Adds a version of a model. Returns the existing version if the same content was registered before."""
        return from_json(ModelVersion, self._post("/v1/models", _to_body(spec)))

    def models(self, *, limit: int = 100, offset: int = 0) -> list[RegisteredModel]:
        return from_json(list[RegisteredModel], self._get("/v1/models", {"limit": limit, "offset": offset}))

    def model(self, name: str) -> RegisteredModel:
        return from_json(RegisteredModel, self._get(f"/v1/models/{name}"))

    def model_versions(self, name: str, *, limit: int = 100, offset: int = 0) -> list[ModelVersion]:
        """Returns versions of a model, newest first."""
        query = {"limit": limit, "offset": offset}
        return from_json(list[ModelVersion], self._get(f"/v1/models/{name}/versions", query))

    def model_version(self, reference: ModelReference) -> ModelVersion:
        which = reference.alias or reference.version
        return from_json(ModelVersion, self._get(f"/v1/models/{reference.name}/versions/{which}"))

    def promote(self, name: str, alias: str, change: AliasSpec) -> AliasChange:
        """Points an alias of a model at another version, or removes the alias."""
        body = change.model_dump(mode="json")
        return from_json(AliasChange, self._write("PUT", f"/v1/models/{name}/aliases/{alias}", body))

    def model_history(
        self, name: str, *, alias: str | None = None, until_s: float | None = None, limit: int = 100
    ) -> list[AliasChange]:
        """Returns the changes of a model's aliases, newest first. `until_s` leaves out later changes."""
        query = {"alias": alias, "until_s": until_s, "limit": limit}
        return from_json(list[AliasChange], self._get(f"/v1/models/{name}/history", query))

    def plans(self, *, limit: int = 50, until_s: float | None = None) -> list[dict[str, Any]]:
        """Returns the latest plans, newest last, with actions in the form of `Plan.to_json`. With `until_s`, returns
        only plans made up to that time."""
        return list(self._get("/v1/plans", {"limit": limit, "until_s": until_s}))

    def corrections(self) -> Corrections:
        return from_json(Corrections, self._get("/v1/corrections"))

    def snapshot(self) -> Snapshot:
        """Returns the input of the controller's next decision, without the jobs' configurations."""
        return from_json(Snapshot, self._get("/v1/snapshot"))

    def cost(self) -> CostReport:
        return from_json(CostReport, self._get("/v1/cost"))

    def costs(self, by: By, *, since_s: float = 0.0) -> CostTable:
        """Returns costs by group, for billing intervals that began at `since_s` (seconds since the epoch) or later."""
        return from_json(CostTable, self._get(f"/v1/cost/{by}", {"since_s": since_s}))

    def teams(self) -> list[TeamView]:
        return from_json(list[TeamView], self._get("/v1/teams"))

    def change_team(self, name: str, **changes: object) -> TeamSpec:
        """Sets the fields of the team's TeamSpec that are named in `changes`."""
        return from_json(TeamSpec, self._write("PATCH", f"/v1/teams/{name}", changes))

    def create_key(self, spec: KeySpec) -> NewKey:
        """Creates an API key. If the API does not respond, the request is not sent again. If the response is lost, the
        key's secret is lost, too."""
        return from_json(NewKey, json.loads(self._respond("POST", "/v1/keys", None, _to_body(spec), patience_s=0.0)))

    def keys(self, *, limit: int = 100, offset: int = 0, ended: bool = False) -> list[KeyView]:
        """Returns API keys, newest first. With `ended`, the result includes keys that were revoked or have expired."""
        query = {"limit": limit, "offset": offset, "ended": ended}
        return from_json(list[KeyView], self._get("/v1/keys", query))

    def key(self, key_id: str) -> KeyView:
        return from_json(KeyView, self._get(f"/v1/keys/{key_id}"))

    def rotate_key(self, key_id: str, *, grace_s: float = 0.0) -> NewKey:
        """Returns a new key that replaces this one. The old key stays valid for `grace_s` seconds."""
        path, query = f"/v1/keys/{key_id}/rotate", {"grace_s": grace_s}
        return from_json(NewKey, json.loads(self._respond("POST", path, query, patience_s=0.0)))

    def revoke_key(self, key_id: str) -> KeyView:
        return from_json(KeyView, self._post(f"/v1/keys/{key_id}/revoke"))

    def usage(self, *, before: int | None = None, limit: int = 100, **which: str | float | None) -> UsagePage:
        """Returns a page of billed requests, newest first. Filters: key, team, user, model, since_s, until_s."""
        return from_json(UsagePage, self._get("/v1/usage", {**which, "before": before, "limit": limit}))

    def usage_sums(self, by: UsageBy, **which: str | float | None) -> list[UsageSum]:
        """Returns sums of usage by group, over the requests that match the filters of `usage`."""
        return from_json(list[UsageSum], self._get(f"/v1/usage/{by}", which))

    def audit(self, *, before: int | None = None, limit: int = 100, **which: str | float | None) -> list[AuditEntry]:
        """Returns entries of the audit log, newest first. `which` filters the entries by actor, action, object, since_s
        and until_s."""
        return from_json(list[AuditEntry], self._get("/v1/audit", {**which, "before": before, "limit": limit}))

    def verify_audit(self, head: str | None = None) -> ChainVerdict:
        """Checks the audit log's hash chain. `head` is an entry `NUMBER:HASH` that was saved earlier. If it is given,
        the log must still contain that entry."""
        return from_json(ChainVerdict, self._get("/v1/audit/verify", {"head": head}, timeout_s=_UPLOAD_TIMEOUT_S))

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: object = None, query: Mapping[str, Any] | None = None) -> Any:
        """Calls a route for which this class has no method, and repeats the request while the API is away."""
        return self._write(method, path, body, query)

    def _get(self, path: str, query: Mapping[str, Any] | None = None, *, timeout_s: float = _TIMEOUT_S) -> Any:
        with _cluster_storage():
            return json.loads(self._respond("GET", path, query, patience_s=_READ_AWAY_S, timeout_s=timeout_s))

    def _post(self, path: str, body: object = None, query: Mapping[str, Any] | None = None) -> Any:
        return self._write("POST", path, body, query)

    def _write(self, method: str, path: str, body: object = None, query: Mapping[str, Any] | None = None) -> Any:
        with _cluster_storage():
            return json.loads(self._respond(method, path, query, body, patience_s=_AWAY_S))

    def _respond(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        *,
        patience_s: float,
        timeout_s: float = _TIMEOUT_S,
    ) -> bytes:
        """Sends a request until the API answers. Every request may be repeated: submissions have a key, others are
        idempotent."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                status, answer = self._http.request(method, path, query or {}, body, timeout_s=timeout_s)
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() >= deadline:
                    raise ClusterError(
                        f"the API at {self.address} does not answer: {str(error) or type(error).__name__}.",
                        hint="`raytide status` shows what runs; `raytide up --local` starts a cluster.",
                    ) from None
                time.sleep(random.uniform(0.1, 0.5))
                continue
            if 200 <= status < 300:
                return answer
            raise _error(status, answer)


def _to_body(spec: JobSpec | ServeSpec | KeySpec | ModelVersionSpec | AdapterChange) -> dict[str, Any]:
    """Returns the spec without its default team, because the API takes the token's team."""
    return spec.model_dump(mode="json", exclude=None if "team" in spec.model_fields_set else {"team"})


@contextmanager
def _cluster_storage() -> Iterator[None]:
    """Turns a StorageError of the cluster into a ClusterError, because drivers and watchers survive a ClusterError,
    such as that of an API that restarts."""
    try:
        yield
    except StorageError as error:
        raise ClusterError(error.message, hint=error.hint) from error


def _error(status: int, answer: bytes) -> errors.RaytideError:
    try:
        body = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        return ClusterError(f"the API answered {status}: {answer[:300].decode(errors='replace')}")
    return errors.from_json(body)
