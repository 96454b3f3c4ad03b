"""Runs stages through the API. Data, train, compress, eval and script stages are ordinary jobs in the queue."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from raytide.control.client import ApiClient
from raytide.control.views import JobView
from raytide.core.errors import DataError
from raytide.core.io.storage import exists, join, read_bytes
from raytide.core.objects.gang import GangSpec
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.specs.script import ATTEMPTS, FAILURES, ScriptSpec
from raytide.workflows.stages import registry
from raytide.workflows.stages.base import StageReport, StageTask
from raytide.workflows.stages.configs import EvalSpec, ScriptStageSpec, compress_recipe, data_spec, train_spec
from raytide.workflows.sweep.halving import Curve

METRICS_FILE = "metrics.json"
_MOST_METRICS = 100
_POINTS = 2000
_OF_THE_RUNNER = frozenset({ATTEMPTS, FAILURES, "world", "exit_code", "restarts", "left_s", "redo_s", "lost_s"})
"""Numbers in a job's progress that describe its run, not its result."""


class ApiRunner:
    """Submits stages with the rights of the flow's own job.

    `package` is the digest of the flow's packed working directory.
    """

    def __init__(self, client: ApiClient, package: str = "") -> None:
        self._client, self._package = client, package

    def submit(self, task: StageTask) -> str:
        if task.options.kind == "register":
            return registry.register(self._client, task)
        if task.options.kind == "serve":
            return registry.serve(self._client, task)
        return self._client.submit(job_spec(task, self._package), key=task.key).job.id

    def look(self, task: StageTask, handle: str, metric: str = "") -> StageReport:
        if task.options.kind == "register":
            return registry.registered(handle)
        if task.options.kind == "serve":
            return registry.served(self._client, task, handle)
        view = self._client.job(handle)
        return report_of(task, view, self._curve(view, metric) if metric else ())

    def stop(self, task: StageTask, handle: str) -> None:
        if task.options.kind not in ("register", "serve"):
            self._client.stop(handle)

    def _curve(self, view: JobView, metric: str) -> Curve:
        """Returns a trial's values of the metric by step: for a training, from its log; for a script, only the last
        reported value.
        """
        job = view.job
        if job.spec.kind is not JobKind.TRAIN:
            step, value = job.progress_number("step"), job.progress.get(metric)
            known = step is not None and isinstance(value, int | float)
            return ((int(step or 0), float(value)),) if known else ()  # type: ignore[arg-type]
        if "step" not in job.progress:
            return ()
        found = self._client.call("GET", f"/v1/jobs/{job.id}/metrics", query={"points": _POINTS})
        values = found["values"].get(metric, ())
        logged = zip(found["steps"], values, strict=False)
        return tuple((int(step), math.nan if value is None else float(value)) for step, value in logged)


def job_spec(task: StageTask, package: str) -> JobSpec:
    """Returns the spec of the job that runs a data, train, compress, eval or script stage. Raises ConfigError for an
    invalid stage.
    """
    spec, options = dict(task.spec), task.options
    gang = options.gang or GangSpec.parse({"cpus": 1}, where=task.name)
    if options.kind == "data":
        data = data_spec(spec, task.name, task.out, options)
        kind, gang, config = JobKind.DATA, data.gang, data.model_dump(mode="json")
    elif options.kind == "train":
        train = train_spec(spec, task.name, task.out, options)
        kind, gang, config = JobKind.TRAIN, train.asks, train.model_dump(mode="json")
    elif options.kind == "compress":
        text = compress_recipe(spec, task.name, task.out).model_dump_json(exclude_defaults=True)
        command = ("python", "-m", "raytide.workflows.stages.compression", text)
        script = ScriptSpec.parse({"command": command, "env": {"RAYTIDE_STAGE_OUT": task.out}}, where=task.name)
        kind, config = JobKind.SCRIPT, script.model_dump(mode="json")
    elif options.kind == "eval":
        text = EvalSpec.parse(spec, where=task.name).model_dump_json(exclude_defaults=True)
        command = ("python", "-m", "raytide.workflows.stages.evaluation", text)
        script = ScriptSpec.parse({"command": command, "env": {"RAYTIDE_STAGE_OUT": task.out}}, where=task.name)
        kind, config = JobKind.SCRIPT, script.model_dump(mode="json")
    else:
        stage = ScriptStageSpec.parse(spec, where=task.name)
        kind, config = JobKind.SCRIPT, stage.script(task.out, package).model_dump(mode="json")
    fields: dict[str, object] = {
        "kind": kind,
        "name": task.name,
        "gang": gang,
        "config": config,
        "priority": options.priority,
        "budget_usd": options.budget_usd,
        "labels": dict(task.labels),
        **({"team": task.team} if task.team else {}),
    }
    return JobSpec.parse(fields, where=task.name)


def report_of(task: StageTask, view: JobView, curve: Curve = ()) -> StageReport:
    """Returns the state of a stage, derived from the state of its job. If the stage is done, the result includes the
    stage's outputs and metrics.
    """
    job = view.job
    if not job.is_final:
        return StageReport("running", curve=curve)
    if job.state is not JobState.SUCCEEDED:
        return StageReport("failed", f"{job.id} {job.state}: {job.reason}", curve=curve)
    try:
        outputs, metrics = outputs_of(task, job), metrics_of(task, job)
    except DataError as error:
        return StageReport("failed", str(error), curve=curve)
    return StageReport("done", outputs=outputs, metrics=metrics, curve=curve)


def outputs_of(task: StageTask, job: Job) -> dict[str, str]:
    if task.options.kind == "data":
        return {"out": task.out}
    if task.options.kind == "train":
        return {"out": task.out, "model": str(job.progress.get("model", join(task.out, "model"))), "job": job.id}
    if task.options.kind == "compress":
        return {"out": task.out, "model": join(task.out, "model"), "job": job.id}
    return {"out": task.out, "job": job.id}


def metrics_of(task: StageTask, job: Job) -> dict[str, float]:
    """Returns the metrics of a stage: the numbers that the job reported, and the numbers in its metrics.json. Those in
    metrics.json take precedence.
    """
    reported: dict[str, object] = {name: value for name, value in job.progress.items() if name not in _OF_THE_RUNNER}
    return {**_numbers(reported), **(_written(task.out) if task.options.kind in ("compress", "eval", "script") else {})}


def _written(out: str) -> dict[str, float]:
    url = join(out, METRICS_FILE)
    if not exists(url):
        return {}
    try:
        body = json.loads(read_bytes(url))
    except ValueError as error:
        raise DataError(f"{url} is not JSON: {error}.", hint="Write a mapping of numbers there.") from None
    if not isinstance(body, dict):
        raise DataError(f"{url} is no mapping.", hint="Write a mapping of numbers there.")
    return _numbers(body)


def _numbers(found: Mapping[str, object]) -> dict[str, float]:
    numbers = {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    return dict(list(numbers.items())[:_MOST_METRICS])
