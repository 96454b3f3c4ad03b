"""A job: a gang with work to do. Everything that runs on leased nodes is a job, however it was submitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from raytide.core import bounds
from raytide.core.clock import Due, deadline_text, parse_deadline
from raytide.core.config import Config
from raytide.core.objects.gang import GangSpec


class JobKind(StrEnum):
    TRAIN = "train"  # raytide runs its driver: the elastic trainer
    DATA = "data"  # raytide runs its driver: a dataset build
    SCRIPT = "script"  # raytide runs its driver: a command on every member
    GANG = "gang"  # a driver outside raytide holds the lease and keeps it alive by asking for it


class JobState(StrEnum):
    QUEUED = "queued"
    ADMITTED = "admitted"  # it has a lease; nodes are on their way
    RUNNING = "running"  # its lease was active at least once
    STOPPING = "stopping"  # a stop was requested; its driver is being ended
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


UNDERESTIMATED = 0.05
"""The share of its estimate that a job has left when it runs beyond it."""

_MOST = 1e12
"""Reported numbers beyond this are ignored."""
_LONGEST_S = 1e9

FINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED})


BudgetPer = Literal["job", "month"]


class JobSpec(Config):
    """The specification of a job. `config` is the kind's own spec (TrainSpec, DataSpec, ScriptSpec) as JSON."""

    kind: JobKind
    name: bounds.Name
    team: bounds.Name = "default"
    gang: GangSpec
    config: dict[str, object] = Field(default_factory=dict)
    priority: bounds.Name = "normal"
    """A class of `metadata.raytide.priorities`."""
    preemptible: bool | None = None
    """It may be preempted, after a checkpoint; by default training jobs only."""
    budget_per: BudgetPer = "job"
    """The period of both budgets: the job's whole life, or each calendar month (UTC)."""
    budget_usd: bounds.Dollars | None = None
    """It checkpoints and waits once it has cost this much. A job that cannot be preempted runs on."""
    soft_budget_usd: bounds.Dollars | None = None
    """Once it has cost this much it is admitted to spot nodes only, and borrows nothing."""
    deadline: datetime | timedelta | None = None
    """The time by which it must be done; a time from now is resolved at submission."""
    estimate_h: float | None = Field(default=None, gt=0)
    """Hours of work on the whole gang, until the job itself reports how much is left."""
    labels: bounds.Labels = Field(default_factory=dict)
    """Labels for the user's own purposes; `project` and `model` also group costs."""
    max_restarts: int = Field(default=3, ge=0, le=10_000)
    """The most restarts of a driver that died (not of one that failed)."""
    heartbeat_timeout_s: bounds.Seconds = Field(default=10.0, gt=0)
    """A GANG job ends when its driver has not asked for its lease for this long."""

    @field_validator("deadline", mode="before")
    @classmethod
    def _due(cls, said: object) -> Due | None:
        return None if said is None else parse_deadline(said)

    @field_serializer("deadline", when_used="json-unless-none")
    def _due_text(self, deadline: Due) -> str:
        return deadline_text(deadline)

    @model_validator(mode="after")
    def _budget(self) -> JobSpec:
        if self.budget_per == "month" and self.budget_usd is None and self.soft_budget_usd is None:
            raise ValueError("budget_per without a budget: give budget_usd or soft_budget_usd")
        return self

    @property
    def is_preemptible(self) -> bool:
        return self.kind is JobKind.TRAIN if self.preemptible is None else self.preemptible

    @property
    def due_at_s(self) -> float | None:
        """Seconds since the epoch; None without a deadline, and before submission."""
        return self.deadline.timestamp() if isinstance(self.deadline, datetime) else None


@dataclass(frozen=True, slots=True)
class Job:
    id: str
    spec: JobSpec
    user: str
    state: JobState
    submitted_at_s: float
    admitted_at_s: float | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    stop_requested: bool = False
    reason: str = ""
    """The reason for this state; for a failure, what failed and what to do."""
    restarts: int = 0
    """Driver attempts after the first."""
    head_losses: int = 0
    """The restarts whose driver was lost with its head, which `max_restarts` does not count."""
    node_losses: int = 0
    """The restarts whose driver had lost the nodes of all its members, which `max_restarts` does not count either."""
    heartbeat_at_s: float | None = None
    progress: Mapping[str, float | int | str] = field(default_factory=dict)
    released_by_driver: str | None = None
    """Set when a GANG driver released its lease: "" after success, else the error."""
    attained_gpu_s: float = 0.0
    """GPU-seconds of its earlier spells; `raytide.queue.lifecycle.attained_service` adds the present one."""
    held_s: float = 0.0
    """Time with its gang, in its earlier spells."""
    spell_since_s: float | None = None
    """Since when it has held the present number of GPUs."""
    spell_gpus: float = 0.0
    preemptions: int = 0
    """Preemptions of the whole gang."""
    preempted_at_s: float | None = None
    reserved_micro_usd: int = 0
    """The total that it may have cost before its next reservation: see `raytide.queue.budget`."""
    struck_at_s: float | None = None
    """The time at which it last lost members, by preemption or with their node."""
    struck_by: str = ""
    """The preemptor, or the node."""
    unreadable: str = ""
    """The error of its stored spec, which an earlier release accepted and this one rejects; `spec` is a stand-in."""
    lost_s: float = 0.0
    """The part of its reported `lost_s` (seconds of work done again) that the ledger has booked."""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    def held_for_s(self, now_s: float) -> float:
        """The seconds for which it has held a gang, over all its runs."""
        return self.held_s + (0.0 if self.spell_since_s is None else max(0.0, now_s - self.spell_since_s))

    def remaining_s(self, now_s: float) -> float | None:
        """Returns the seconds of work left on its present gang: as reported (`left_s`), else by the rate of its steps,
        else by its estimate. None if unknown.
        """
        left_s = self._left_s(now_s)
        return None if left_s is None else min(max(0.0, left_s), _LONGEST_S)

    def _left_s(self, now_s: float) -> float | None:
        if (left_s := self.progress_number("left_s")) is not None:
            return left_s
        step = self.progress_number("step")
        steps = self.progress_number("steps") or _plausible_number(self.spec.config, "steps")
        if step is not None and steps is not None and 0 < step <= steps:
            return self.held_for_s(now_s) / step * (steps - step)
        if self.spec.estimate_h is None:
            return None
        estimate_s = self.spec.estimate_h * 3600.0
        return max(estimate_s - self.held_for_s(now_s), UNDERESTIMATED * estimate_s)

    @property
    def redo_s(self) -> float:
        """The most seconds of work that are repeated if the job loses its gang, as its driver reported."""
        return min(max(0.0, self.progress_number("redo_s") or 0.0), _LONGEST_S)

    def progress_number(self, name: str) -> float | None:
        """Returns a number from the job's reported progress; None if it is missing or implausible."""
        return _plausible_number(self.progress, name)


def _plausible_number(values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= _MOST else None  # type: ignore[arg-type]
