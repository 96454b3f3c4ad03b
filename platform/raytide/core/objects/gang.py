"""Gangs, leases and their clients. The members of a gang are useful only together, and the queue grants a gang its
lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol, Self

from pydantic import AfterValidator, Field, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.io.html import ShownAsHtml
from raytide.core.objects.hardware.resources import NODE_WORDS, expand
from raytide.core.objects.hardware.transfer import DataInput

CPUS_OF_A_GPU = 8.0
"""The number of CPUs that count as one GPU in the order of members without GPUs."""


def _some(resources: dict[str, float]) -> dict[str, float]:
    if not any(amount > 0 for amount in resources.values()) or any(amount < 0 for amount in resources.values()):
        raise ValueError("a member needs some resource, and none negative")
    for name, amount in resources.items():
        if 0 < amount < bounds.LEAST_AMOUNT or amount > bounds.MOST_AMOUNT:
            least, most = bounds.LEAST_AMOUNT, bounds.MOST_AMOUNT
            raise ValueError(f"{amount:g} {name}: an amount is 0 or between {least:g} and {most:g}")
        if name == "GPU" and amount > 1 and amount != int(amount):
            raise ValueError(f"{amount:g} GPU: Ray gives a part of one GPU, or whole ones")
    return resources


Needed = Annotated[dict[bounds.Name, float], Field(max_length=bounds.MOST_RESOURCES), AfterValidator(_some)]
"""The resources of one member."""


class Shape(Config):
    """One acceptable form of a gang: a number of members. Each member fits on a single node.

    Ranks that must share a node form one member. For example, 8 GPUs on one node are one member with `GPU: 8`.
    """

    members: int = Field(default=1, ge=1, le=bounds.MOST_MEMBERS)
    min_members: int | None = Field(default=None, ge=1)
    """The fewest members that the gang starts or continues with; all of `members` by default."""
    resources: Needed
    labels: bounds.Labels = Field(default_factory=dict)
    """A label selector for the nodes: {"ray.io/market-type": "spot"}."""
    gpu_memory_gb: float | None = Field(default=None, gt=0, le=10_000)
    """The least memory of each GPU, in 10^9 bytes. At submission it becomes a label of the node types that have it."""
    together: bounds.Word = ""
    """A node label (rack, NVLink domain, zone): all members are placed on nodes with the same value of it."""
    inputs: tuple[DataInput, ...] = Field(default=(), max_length=100)
    """The data that each member reads, from which the price of getting them to a node is computed; added to a training
    at submission.
    """

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, fields: object) -> object:
        """Expands the keywords of `raytide.core.objects.hardware.resources` to fields."""
        return expand(fields) if isinstance(fields, Mapping) else fields

    @model_validator(mode="after")
    def _order(self) -> Shape:
        if self.min_members is not None and self.min_members > self.members:
            raise ValueError(f"min_members {self.min_members} is above members {self.members}")
        return self

    @classmethod
    def computed(cls, resources: Mapping[str, float], labels: Mapping[str, str], together: str = "") -> Self:
        """Returns a shape with one member. The member's resources are computed or reported, not requested by a user.
        They are not validated, because they may be outside the limits for users.
        """
        return cls.model_construct(
            members=1,
            min_members=None,
            resources=dict(resources),
            labels=dict(labels),
            gpu_memory_gb=None,
            together=together,
            inputs=(),
        )

    @classmethod
    def words(cls) -> frozenset[str]:
        """Returns the keywords with which a spec may describe a shape."""
        return frozenset({*cls.model_fields, *NODE_WORDS})

    @property
    def gpus(self) -> float:
        """The size of one member in GPUs. If a member has no GPU, its CPUs are converted: CPUS_OF_A_GPU of them count
        as one GPU."""
        return self.resources.get("GPU", 0.0) or self.resources.get("CPU", 0.0) / CPUS_OF_A_GPU

    @property
    def at_least(self) -> int:
        return self.members if self.min_members is None else self.min_members

    def describe(self) -> str:
        amounts = " + ".join(f"{amount:g} {name}" for name, amount in sorted(self.resources.items()) if amount)
        where = ", ".join(f"{key.removeprefix('ray.io/')}={value}" for key, value in sorted(self.labels.items()))
        one = f" in one {self.together.removeprefix('ray.io/')}" if self.together else ""
        return f"{self.members} x ({amounts})" + (f" on {where}" if where else "") + one


class GangSpec(Config):
    """A job's acceptable shapes in order of preference. If the cost of the job's work is known for the shapes, the
    cheapest shape is tried first.
    """

    shapes: tuple[Shape, ...] = Field(min_length=1, max_length=bounds.MOST_SHAPES)
    form_timeout_s: bounds.Seconds = Field(default=60.0, gt=0)
    """The seconds within which all placement groups must be ready; otherwise all are removed, and the gang waits
    again."""

    @model_validator(mode="before")
    @classmethod
    def _one_shape(cls, fields: object) -> object:
        """Expands a gang with one shape that is written without `shapes`: `{gpus: "H100:8", nodes: [1, 4]}`."""
        if not isinstance(fields, Mapping) or not fields.keys() & Shape.words():
            return fields
        shape = {key: value for key, value in fields.items() if key in Shape.words()}
        if "shapes" in fields:
            raise ValueError(f"shapes and {', '.join(sorted(shape))} exclude each other")
        return {"shapes": [shape], **{key: value for key, value in fields.items() if key not in shape}}


class LeaseState(StrEnum):
    WAITING = "waiting"  # admitted; not every needed member has a node that is ready
    FORMING = "forming"  # its placement groups are being made
    ACTIVE = "active"  # at least `min` members are usable
    RELEASED = "released"  # over: the job ended


class MemberState(StrEnum):
    WAITING = "waiting"  # no node chosen
    ASSIGNED = "assigned"  # a node is chosen, perhaps still launching
    FORMING = "forming"  # its placement group exists, pinned to the node, not ready yet
    READY = "ready"  # usable
    LEAVING = "leaving"  # usable until `leaves_at_s`: its node drains, or it is preempted
    PARKED = "parked"  # given away by the queue: it wants no node until the queue gives it back


_USABLE = (MemberState.READY, MemberState.LEAVING)
_WITHOUT_NODE = (MemberState.WAITING, MemberState.PARKED)


@dataclass(frozen=True, slots=True)
class Member(ShownAsHtml):
    """One member of a lease: a place on a node. `incarnation` grows whenever the place has to be filled anew."""

    index: int
    state: MemberState = MemberState.WAITING
    node_id: str = ""
    ray_node_id: str = ""
    address: str = ""
    placement_group_id: str = ""
    """The id in hex, for `PlacementGroup(PlacementGroupID(bytes.fromhex(...)))`. The group has one bundle with the
    shape's resources.
    """
    incarnation: int = 0
    leaves_at_s: float | None = None
    """The time at which a leaving member stops being usable, or at which a parked member was parked."""
    gives_way: bool = False
    """True if the member is leaving because of a preemption, and will be parked although its node stays."""
    given_to: str = ""
    """The job or endpoint for which a yielding or parked member freed its resources."""

    @property
    def has_node(self) -> bool:
        return self.state not in _WITHOUT_NODE

    @property
    def needs_node(self) -> bool:
        """True if the member has no node, or must move because its node leaves."""
        is_moving = self.state is MemberState.LEAVING and not self.gives_way
        return is_moving or self.state is MemberState.WAITING

    @property
    def is_parked(self) -> bool:
        return self.state is MemberState.PARKED

    @property
    def is_usable(self) -> bool:
        return self.state in _USABLE


@dataclass(frozen=True, slots=True)
class Lease(ShownAsHtml):
    """The nodes that the queue grants to a job's gang. `epoch` grows with every change to which the lease's holder must
    react.
    """

    id: str
    job_id: str
    shape: Shape
    state: LeaseState
    members: tuple[Member, ...]
    epoch: int = 0
    form_timeout_s: float = 60.0
    created_at_s: float = 0.0
    forming_since_s: float | None = None
    reason: str = ""

    @property
    def version(self) -> str:
        """The lease's id and epoch. The holder reports this value as `settled` once nothing runs any more on the
        members that leave in this epoch.
        """
        return f"{self.id}@{self.epoch}"

    @property
    def member_count(self) -> int:
        """The number of members that have a node, including unusable ones."""
        return sum([member.state not in _WITHOUT_NODE for member in self.members])

    @property
    def is_preempted(self) -> bool:
        """True while the whole gang is being preempted. Afterwards the job returns to the queue."""
        return all(member.gives_way or member.state is MemberState.PARKED for member in self.members)

    @property
    def usable(self) -> tuple[Member, ...]:
        return tuple([member for member in self.members if member.state in _USABLE])


class LeaseClient(Protocol):
    """The interface through which the driver of a gang follows its lease. Each call counts as a heartbeat of the
    driver. Without heartbeats, the driver loses the lease.
    """

    def lease(self, job_id: str) -> Lease:
        """Returns the lease as it is now. Raises LeaseLostError if the job is over or is being stopped."""

    def wait_lease(self, job_id: str, *, newer_than: int, timeout_s: float) -> Lease:
        """Returns the lease as soon as its epoch is above `newer_than`. After `timeout_s` seconds, returns the lease as
        it is then. Raises LeaseLostError if the job is over or is being stopped."""

    def report(self, job_id: str, progress: Mapping[str, float | int | str]) -> None:
        """Reports the job's progress for `raytide ps` and the SDK: step, steps, loss, tokens_per_s, restarts and so
        on."""


class GangClient(LeaseClient, Protocol):
    """A LeaseClient that can also release the lease. The process that holds the lease of a GANG job uses this
    client.
    """

    def release(self, job_id: str, *, error: str = "") -> None:
        """Releases the lease. `error` is empty if the work is done, else it describes why the work failed."""
