"""The interface between the executor and the runner of stages: `runner` uses the API; tests have their own runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from raytide.workflows.spec import StageSpec
from raytide.workflows.sweep.halving import Curve


@dataclass(frozen=True, slots=True)
class StageTask:
    """One attempt of a stage, or of a trial of its sweep, without references."""

    name: str
    """The name of its job, from the names of flow and stage and the trial's number."""
    options: StageSpec
    """The stage as the file has it; `spec` below is the spec that runs."""
    spec: Mapping[str, object]
    out: str
    """The folder of its results."""
    key: str
    """The key of its submission: submitting the same key again gives the same job."""
    team: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageReport:
    """The state of a submitted attempt."""

    status: Literal["running", "done", "failed", "refused"]
    """The state. `refused`: a rule of the stage does not hold, so it and all stages that need it are skipped."""
    reason: str = ""
    outputs: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    curve: Curve = ()
    """The values of the swept metric so far, by step; only for a trial."""
    is_final: bool = False
    """True for a failure that another attempt would repeat."""


class StageRunner(Protocol):
    """Submits attempts and reads their states. Every method may raise ClusterError, and is then called again."""

    def submit(self, task: StageTask) -> str:
        """Submits an attempt and returns its id, such as that of its job. Another call with the same key returns the
        same id, whatever happened in between.
        """

    def look(self, task: StageTask, handle: str, metric: str = "") -> StageReport:
        """Returns the state of an attempt; with `metric`, also the curve of that metric."""

    def stop(self, task: StageTask, handle: str) -> None:
        """Requests that an attempt ends; has no effect on an attempt that has ended."""
