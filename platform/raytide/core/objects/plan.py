"""The actions that a decision may take. Each action carries its reason as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Literal

from raytide.core.objects.gang import Lease

UNMANAGED = "unmanaged"
"""The subject of actions for work in Ray without a lease and for the nodes bought for it; also the team that pays for
them.
"""


@dataclass(frozen=True, slots=True)
class Rejected:
    """An alternative that was not chosen, and the reason."""

    choice: str
    reason: str
    extra_micro_usd_h: int | None = None
    """The cost an hour that the alternative adds to the chosen one; None if it was not available."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Grants a job its lease."""

    job_id: str
    lease: Lease
    reason: str
    reserved_micro_usd: int = 0
    """The total cost in micro-dollars that the job may reach before its next reservation."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A notice that a subject (job, lease or endpoint) waits. It contains the constraint that blocks the subject, the
    reason in words, and a remedy if one is known.
    """

    subject: str
    constraint: Literal[
        "capacity",
        "stock",
        "behind",
        "starting",
        "impossible",
        "cap",
        "signal",
        "quota",
        "budget",
        "rate",
        "deadline",
        "quarantined",
    ]
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Assign:
    """Assigns a member of a lease to a node, which exists or is launched by the same plan."""

    lease_id: str
    member: int
    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unassign:
    """Takes the node from a member whose gang has not started.

    `reason` says which of two cases applies. In the first, the rest of the gang cannot be placed, and an incomplete
    gang must not hold nodes. In the second, the deadline of the gang's job now requires on-demand nodes.
    """

    lease_id: str
    member: int
    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """Ends a lease that has no members left, so that its job may be admitted with another of its shapes."""

    job_id: str
    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Shrink:
    """Preempts some members of an elastic gang, which continues without them. These members stay usable until
    `leaves_at_s`, or until the lease's holder has vacated them."""

    job_id: str
    lease_id: str
    members: tuple[int, ...]
    leaves_at_s: float
    reason: str
    by: tuple[str, ...] = ()
    """The jobs or endpoints that take their place."""
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True, slots=True)
class Preempt:
    """Preempts a whole gang. Its job writes a checkpoint, and returns to the queue after `leaves_at_s`."""

    job_id: str
    lease_id: str
    leaves_at_s: float
    reason: str
    by: tuple[str, ...] = ()
    """The jobs or endpoints that preempt it; empty if its own budget is spent."""


@dataclass(frozen=True, slots=True)
class Grow:
    """Unparks members of a gang. From then on, these members wait for nodes."""

    job_id: str
    lease_id: str
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Buys a node. `node_id` is the idempotency key for the provider."""

    node_id: str
    node_type: str
    zone: str
    subject: str
    """The purpose: a lease, an endpoint, `unmanaged`, `minimum`, `warm`, or `move node-7`, which it replaces."""
    reason: str
    cost_micro_usd_h: int = 0
    """The change in the fleet's price, in micro-dollars an hour."""
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """Publishes the target number of replicas of an endpoint."""

    endpoint: str
    replicas: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Drains a node, so that Ray places nothing new on it.

    Ray refuses a drain of kind `idle` if anything runs on the node. With kind `notice`, the node leaves at
    `deadline_s`, whatever runs there.
    """

    node_id: str
    kind: Literal["idle", "notice"]
    deadline_s: float
    reason: str
    cost_micro_usd_h: int = 0
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminate:
    node_id: str
    reason: str
    cost_micro_usd_h: int = 0
    """The change in the fleet's price; 0 for a drained node, because its drain has counted the change."""


Action = Admit | Wait | Shrink | Preempt | Grow | Assign | Unassign | Requeue | Launch | Scale | Drain | Terminate


MOST_WAITS = 100
"""The most Waits of jobs that are stored with a plan. `raytide why` explains the jobs of longer queues one by one."""


@dataclass(frozen=True, slots=True)
class Plan:
    at_s: float
    actions: tuple[Action, ...] = ()

    def for_storage(self) -> Plan:
        """Returns the plan in its stored form. If many jobs wait, the Waits of the last jobs in the queue are replaced
        by a single Wait. This Wait tells how many jobs it stands for.
        """
        waits = [action for action in self.actions if isinstance(action, Wait) and action.subject.startswith("job-")]
        if len(waits) <= MOST_WAITS:
            return self
        rest = {id(wait) for wait in waits[MOST_WAITS:]}
        kept = tuple(action for action in self.actions if id(action) not in rest)
        return Plan(
            self.at_s, (*kept, Wait("queue", "behind", f"{len(rest)} more jobs wait", "See `raytide why JOB`."))
        )

    def to_json(self) -> dict[str, object]:
        return {"at_s": self.at_s, "actions": [describe(action) for action in self.actions]}


def describe(action: Action) -> dict[str, object]:
    """Returns an action as JSON, with its kind as the first key."""
    if isinstance(action, Admit):
        lease = {"id": action.lease.id, "shape": action.lease.shape.describe()}
        return {"action": "admit", **_fields(action), "lease": lease}
    return {"action": type(action).__name__.lower(), **_fields(action)}


def _fields(action: Action) -> dict[str, object]:
    """Returns the fields as `dataclasses.asdict` does, without its deep copies, which are slow for large gangs."""
    return {field.name: _plain(getattr(action, field.name)) for field in fields(action)}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [asdict(item) if isinstance(item, Rejected) else item for item in value]
    return value
