"""The interface between the executor and the runner of stages. The implementation in `runner` uses the API. Tests use
their own implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from raytide.workflows.spec import StageSpec
from raytide.workflows.sweep.halving import Curve


@dataclass(frozen=True, slots=True)
class StageTask:
    """One attempt at a stage, or at a trial of the stage's sweep. The references in `spec` are already replaced by
    values.
    """

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
    """The state of a submitted attempt at a stage or trial."""

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
    """Submits attempts at stages and reads the states of the attempts. Every method may raise ClusterError. The
    executor then calls the method again later.
    """

    def submit(self, task: StageTask) -> str:
        """Submits an attempt and returns its id, such as the id of its job. Calls with the same key always return the
        same id.
        """

    def look(self, task: StageTask, handle: str, metric: str = "") -> StageReport:
        """Returns the state of an attempt. If `metric` is given, the state includes the curve of this metric."""

    def stop(self, task: StageTask, handle: str) -> None:
        """Asks an attempt to end. Has no effect on an attempt that has ended."""
