"""A training run in the SDK: its metrics and curves (also while it runs), profiles on request, and its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytide.actors.trainer.run_log import history
from raytide.actors.trainer.run_log.history import RunHistory
from raytide.actors.trainer.types import RunResult
from raytide.control.client import ApiClient
from raytide.control.views import JobView, from_json
from raytide.core.objects.job import JobKind
from raytide.dashboards.figures.style import Picture
from raytide.dashboards.figures.training import picture
from raytide.sdk.display import Glance
from raytide.sdk.jobs.flow_run import FlowRun, is_flow
from raytide.sdk.jobs.job_run import Run

if TYPE_CHECKING:
    import pyarrow as pa

    from raytide.actors.trainer.run_log.curve import RunCurves

_POINTS = 2000
_PHASES = "times/"
_WATCHED = ("loss", "tokens_per_s")


class TrainRun(Run):
    """A submitted training. Its metrics are read from the run's files if this machine can read them, else from the
    API.
    """

    def metrics(self) -> list[dict[str, Any]]:
        """Returns one mapping for each step so far. A step that was repeated after a failure appears once.

        If the run's files are not on this machine, a long run has at most 2,000 steps in the result.
        """
        return self.history().steps

    def table(self) -> pa.Table:
        """Returns `metrics()` as an Arrow table."""
        import pyarrow as pa

        return pa.Table.from_pylist(self.metrics())

    def events(self) -> list[dict[str, Any]]:
        """Returns the run's events in order: events of the gang, such as lost members, and events of single batches."""
        return self.history().events

    def plot(self) -> Picture:
        """Returns a picture of the run's curves. A notebook displays it. Its `save` writes a .svg, .png or .html
        file.
        """
        return self._picture(self.history())

    def profile(self, steps: int = 3) -> None:
        """Requests a profile of the next `steps` steps. The traces and tables appear in the folder `profile` inside the
        folder that the spec's `out` names.

        The run is not restarted. This machine must be able to write to `out`.
        """
        from raytide.actors.trainer.run_log import profiler as profile

        profile.request(self.out, steps)

    def result(self, timeout_s: float = 86_400.0) -> RunResult:
        """Waits until the run ends and returns its result. Raises RaytideError if the run failed.

        This machine must be able to read the spec's `out`.
        """
        self.wait(timeout_s)
        return history.result(self.out)

    def history(self) -> RunHistory:
        """Returns the steps and events so far. Both are empty before the first step."""
        if "step" not in self.refresh().progress:
            return RunHistory([], [])
        if Path(self.out).is_dir():
            return history.read(self.out)
        from raytide.actors.trainer.run_log.curve import RunCurves

        found = self._client.call("GET", f"/v1/jobs/{self.id}/metrics", query={"points": _POINTS})
        return from_curves(from_json(RunCurves, found))

    def glance(self, *, is_whole: bool = False) -> Glance:
        now = super().glance(is_whole=is_whole)
        if not is_whole or "step" not in self.progress:
            return now
        found = self.history()
        curves = {name: _finite([step.get(name) for step in found.steps]) for name in _WATCHED}
        return replace(now, curves=curves, picture=lambda: str(self._picture(found)))

    def _picture(self, found: RunHistory) -> Picture:
        return picture(found, f"{self.view.job.spec.name} ({self.id})")

    def _repr_html_(self) -> str:
        return super()._repr_html_() + (str(self.plot()) if "step" in self.progress else "")


def from_curves(curves: RunCurves) -> RunHistory:
    """Converts the API's columns to a run history with one mapping for each step, as in a run's files."""
    steps = []
    for place, step in enumerate(curves.steps):
        line: dict[str, Any] = {"step": step, "at_s": curves.at_s[place], "times": {}}
        for name, values in curves.values.items():
            if (value := values[place]) is None:
                continue
            if name.startswith(_PHASES):
                line["times"][name.removeprefix(_PHASES)] = value
            else:
                line[name] = value
        steps.append(line)
    return RunHistory(steps, [dict(event) for event in curves.events])


def run_of(client: ApiClient, view: JobView) -> Run:
    """Returns the handle of a job: a TrainRun, a FlowRun or a plain Run."""
    if view.job.spec.kind is JobKind.TRAIN:
        return TrainRun(client, view)
    return FlowRun(client, view) if is_flow(view) else Run(client, view)


def _finite(values: Sequence[object]) -> list[float]:
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
