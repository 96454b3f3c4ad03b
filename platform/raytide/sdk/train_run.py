"""A training run in the SDK: metrics and their picture, also while it runs, a profile on request, and the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raytide.actors.trainer.run_log import history, plot
from raytide.actors.trainer.types import RunResult
from raytide.control.client import ApiClient
from raytide.control.views import JobView
from raytide.core.objects.job import JobKind
from raytide.sdk.job_run import Run

if TYPE_CHECKING:
    import pyarrow as pa


class Picture:
    """A run's plot: a notebook displays it, and `str()` returns SVG."""

    def __init__(self, svg: str) -> None:
        self._svg = svg

    def __str__(self) -> str:
        return self._svg

    def _repr_html_(self) -> str:
        return self._svg


class TrainRun(Run):
    """A training job. Methods that read its files need a machine that can read the spec's `out`."""

    def metrics(self) -> list[dict[str, Any]]:
        """Returns one mapping for each step so far; steps that were repeated after a failure appear once."""
        return self._history().steps

    def table(self) -> pa.Table:
        """Returns `metrics()` as an Arrow table."""
        import pyarrow as pa

        return pa.Table.from_pylist(self.metrics())

    def events(self) -> list[dict[str, Any]]:
        """Returns the events of the gang and of single batches, in order."""
        return self._history().events

    def plot(self) -> Picture:
        return Picture(plot.svg(self._history(), f"{self.view.job.spec.name} ({self.id})"))

    def profile(self, steps: int = 3) -> None:
        """Requests a profile of the next steps: traces and tables appear in `out`/profile. The run is not restarted."""
        from raytide.actors.trainer.run_log import profiler as profile

        profile.request(self.out, steps)

    def result(self, timeout_s: float = 86_400.0) -> RunResult:
        """Waits for the end and returns the result. Raises RaytideError if the run failed."""
        self.wait(timeout_s)
        return history.result(self.out)

    def _history(self) -> history.RunHistory:
        if "step" not in self.refresh().progress:
            return history.RunHistory([], [])
        return history.read(self.out)

    def _repr_html_(self) -> str:
        return super()._repr_html_() + (str(self.plot()) if "step" in self.progress else "")


def run_of(client: ApiClient, view: JobView) -> Run:
    """Returns the handle for a job of this kind."""
    return TrainRun(client, view) if view.job.spec.kind is JobKind.TRAIN else Run(client, view)
