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
"""The share of a job's estimate that counts as its remaining work when it has run longer than estimated."""

_MOST = 1e12
"""Reported numbers beyond this are ignored."""
_LONGEST_S = 1e9

FINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED})


BudgetPer = Literal["job", "month"]


class JobSpec(Config):
    """The specification of a job. `config` is the specification for the job's kind (TrainSpec, DataSpec, ScriptSpec) as
    JSON."""

    kind: JobKind
    name: bounds.Name
    team: bounds.Name = "default"
    gang: GangSpec
    config: dict[str, object] = Field(default_factory=dict)
    priority: bounds.Name = "normal"
    """A class of `metadata.raytide.priorities`."""
    preemptible: bool | None = None
    """True if the job may be preempted, after a checkpoint; None allows it for training jobs only."""
    budget_per: BudgetPer = "job"
    """The period of both budgets: the job's whole life, or each calendar month (UTC)."""
    budget_usd: bounds.Dollars | None = None
    """The cost in dollars at which the job checkpoints and waits. A job that cannot be preempted runs on."""
    soft_budget_usd: bounds.Dollars | None = None
    """The cost in dollars from which the job is admitted to spot nodes only, and borrows no quota."""
    deadline: datetime | timedelta | None = None
    """The time by which it must be done; a time from now is resolved at submission."""
    estimate_h: float | None = Field(default=None, gt=0)
    """The estimated hours of work on the whole gang, used until the job reports its remaining work."""
    labels: bounds.Labels = Field(default_factory=dict)
    """Labels for the user's own purposes; `project` and `model` also group costs."""
    max_restarts: int = Field(default=3, ge=0, le=10_000)
    """The most restarts of a driver that died; a driver that failed is not restarted. Drivers that were lost with the
    head, or with the nodes of all members, do not count."""
    heartbeat_timeout_s: bounds.Seconds = Field(default=10.0, gt=0)
    """The seconds without a poll or report of its driver after which a GANG job ends; at most 4 after a poll that the
    driver broke off."""

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
        """The deadline in seconds since the epoch. None if the job has no deadline, or has not been submitted yet."""
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
    """The number of driver attempts after the first."""
    head_losses: int = 0
    """The restarts whose driver was lost with its head, which `max_restarts` does not count."""
    node_losses: int = 0
    """The restarts whose driver had lost the nodes of all its members, which `max_restarts` does not count either."""
    heartbeat_at_s: float | None = None
    progress: Mapping[str, float | int | str] = field(default_factory=dict)
    released_by_driver: str | None = None
    """Set when a GANG driver releases its lease: "" after success, else the error."""
    attained_gpu_s: float = 0.0
    """The GPU-seconds of its earlier spells; `raytide.queue.lifecycle.attained_service` adds the current spell. A spell
    is a time with a constant number of GPUs.
    """
    held_s: float = 0.0
    """The seconds for which it held its gang in earlier spells."""
    spell_since_s: float | None = None
    """The start of the current spell: the time since which it has held its current number of GPUs, which may be 0;
    None if it holds no gang.
    """
    spell_gpus: float = 0.0
    preemptions: int = 0
    """The number of preemptions of the whole gang."""
    preempted_at_s: float | None = None
    reserved_micro_usd: int = 0
    """The total cost in micro-dollars that the job may reach before its next reservation: see
    `raytide.queue.budget`."""
    struck_at_s: float | None = None
    """The time at which it last lost members, by preemption or with their node."""
    struck_by: str = ""
    """The cause of that loss: the preemptors, or the lost nodes."""
    unreadable: str = ""
    """The error of the stored spec, if an earlier release accepted it and this one rejects it; `spec` is then a
    placeholder.
    """
    lost_s: float = 0.0
    """The part of its reported `lost_s` (seconds of work done again) that the ledger has booked."""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    def held_for_s(self, now_s: float) -> float:
        """Returns for how many seconds the job has held a gang, summed over all its attempts."""
        return self.held_s + (0.0 if self.spell_since_s is None else max(0.0, now_s - self.spell_since_s))

    def remaining_s(self, now_s: float) -> float | None:
        """Returns the seconds of work left on the job's present gang, or None if unknown.

        Uses the first of these that is known: the reported `left_s`, the remaining steps at their present rate, the
        job's estimate.
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
        """The maximum work, in seconds, that would be repeated if the job lost its gang now. The driver reports it."""
        return min(max(0.0, self.progress_number("redo_s") or 0.0), _LONGEST_S)

    def progress_number(self, name: str) -> float | None:
        """Returns a number from the progress that the job reported. Returns None if the number is missing or
        implausible."""
        return _plausible_number(self.progress, name)


def _plausible_number(values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= _MOST else None  # type: ignore[arg-type]
