"""Workflows in the SDK: submit a workflow, watch its stages, and resume it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from raytide.control.client import ApiClient
from raytide.control.views import JobView
from raytide.core.config import load_yaml
from raytide.core.errors import ConflictError, NotFoundError
from raytide.core.io.html import framed, table
from raytide.core.io.working_dir import pack
from raytide.core.money import format_usd
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.specs.script import FLOW_RUN, ScriptSpec
from raytide.sdk.display import Glance
from raytide.sdk.jobs.job_run import Run
from raytide.workflows.driver import FAILED
from raytide.workflows.spec import FlowSpec
from raytide.workflows.stages.configs import check
from raytide.workflows.sweep.spec import Value
from raytide.workflows.view import COLUMNS, FlowGraph, StageView, views_of

_SPEC = "RAYTIDE_FLOW"
_RESTARTS = 100
"""The most restarts of a driver that was killed. A flow that failed is not restarted."""


class FlowRun(Run):
    """A submitted workflow: its driver's job, and its stages as the driver last reported them."""

    @property
    def flow(self) -> FlowSpec:
        """The spec of the workflow as it was submitted."""
        return FlowSpec.parse(json.loads(_environment(self.view)[_SPEC]), where=self.id)

    @property
    def run(self) -> str:
        """The id of the run, under which its state is stored. A resumed run keeps its id."""
        return _environment(self.view)[FLOW_RUN]

    @property
    def out(self) -> str:
        return self.flow.out

    def stages(self) -> list[StageView]:
        """Returns the stages in the workflow's order, with their states at the last `refresh`."""
        return views_of(self.flow, self.progress, time.time())

    def stage(self, name: str) -> StageView:
        """Returns the stage with this name. Raises NotFoundError if there is none."""
        found = next((view for view in self.stages() if view.name == name), None)
        if found is None:
            names = ", ".join(self.flow.stages)
            raise NotFoundError(f"{self.id} has no stage {name}.", hint=f"It has {names}.")
        return found

    def graph(self) -> FlowGraph:
        """Returns the graph of the stages. Notebooks display it, and `str` converts it to SVG."""
        return FlowGraph(tuple(self.stages()))

    def resume(self) -> FlowRun:
        """Submits the run again. Failed and skipped stages run again, and finished stages do not."""
        if not self.refresh().view.job.is_final:
            raise ConflictError(f"{self.id} is {self.state}: it needs no resume.", hint="`raytide flow show` shows it.")
        return FlowRun(self._client, self._client.retry(self.id))

    def glance(self, *, is_whole: bool = False) -> Glance:
        stages = self.stages()
        over = sum(view.status in ("done", "skipped", "failed") for view in stages)
        facts = {"state": str(self.state), "cost": format_usd(self.view.cost_micro_usd)}
        facts |= {view.name: " ".join(filter(None, (view.status, view.result, view.why))) for view in stages}
        return Glance(f"flow {self.flow.name} ({self.id})", float(over), float(len(stages)), facts)

    def __repr__(self) -> str:
        return f"FlowRun({self.id}, {self.flow.name}, {self.state})"

    def _repr_html_(self) -> str:
        title = f"flow {self.flow.name} ({self.id}, {self.state})"
        return framed(table(title, COLUMNS, (view.row() for view in self.stages())), str(self.graph()))


def is_flow(view: JobView) -> bool:
    """Returns whether a job is the driver of a workflow."""
    return view.job.spec.kind is JobKind.SCRIPT and _SPEC in _environment(view)


def submit_flow(
    client: ApiClient,
    source: FlowSpec | Mapping[str, object] | str | Path,
    params: Mapping[str, Value] | None = None,
    working_dir: str | Path | None = None,
) -> FlowRun:
    """Checks a workflow and submits its driver as a job. Returns the submitted run. Raises ConfigError if the workflow
    is invalid.

    If there are script stages, the working directory is uploaded. By default it is the folder of the workflow's file.
    """
    flow = _parsed(source, params or {})
    check(flow)
    package = ""
    if any(stage.kind == "script" for stage in flow.stages.values()):
        folder = Path(source).parent if isinstance(source, str | Path) else Path()
        package = client.upload(pack(Path(working_dir) if working_dir is not None else folder))
    text = flow.model_dump_json(exclude_defaults=True)
    script = ScriptSpec(
        command=("python", "-m", "raytide.workflows.driver"),
        package=package,
        env={_SPEC: text, FLOW_RUN: f"{flow.name}-{secrets.token_hex(4)}"},
        retries=_RESTARTS,
        final_exit_codes=(FAILED,),
    )
    fields = {
        "kind": JobKind.SCRIPT,
        "name": flow.name,
        "gang": flow.driver,
        "config": script.model_dump(mode="json"),
        "labels": {"flow": flow.name},
        **({"team": flow.team} if flow.team else {}),
    }
    return FlowRun(client, client.submit(JobSpec.parse(fields, where=flow.name)))


def _parsed(source: FlowSpec | Mapping[str, object] | str | Path, params: Mapping[str, Value]) -> FlowSpec:
    if isinstance(source, FlowSpec):
        body: Mapping[str, object] = source.model_dump(mode="json", exclude_unset=True)
    else:
        body = load_yaml(source) if isinstance(source, str | Path) else source
    where = str(source) if isinstance(source, str | Path) else "flow"
    flow = FlowSpec.parse(body, where=where)
    if unknown := sorted(params.keys() - flow.params.keys()):
        known = ", ".join(flow.params) or "none"
        raise NotFoundError(f"{where} has no parameter {unknown[0]}.", hint=f"It has: {known}.")
    return flow if not params else FlowSpec.parse({**body, "params": {**flow.params, **params}}, where=where)


def _environment(view: JobView) -> dict[str, str]:
    found = view.job.spec.config.get("env")
    return found if isinstance(found, dict) else {}
