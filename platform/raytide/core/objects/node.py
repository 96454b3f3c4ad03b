"""Node types that can be bought, nodes that were bought, and measurements of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from raytide.core.config import Config

Resources = Mapping[str, float]
"""Ray's logical resources: {"CPU": 8, "GPU": 1, "memory": bytes}."""

MARKET_LABEL = "ray.io/market-type"
ZONE_LABEL = "ray.io/availability-zone"
TYPE_LABEL = "ray.io/node-group"
ACCELERATOR_LABEL = "ray.io/accelerator-type"

FRESH_S = 10.0
"""The age above which a measurement of a node, replica or router cannot cause a scale-down."""

Meter = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Signal:
    """A measurement and its time."""

    value: float
    at_s: float
    """The time of the measurement, not of its reading."""

    def is_fresh(self, now_s: float) -> bool:
        return now_s - self.at_s <= FRESH_S


Use = Mapping[Meter, Signal]
"""Physical utilization of one node, 0 to 1: of all its CPUs together, and of its busiest GPU."""


class CapacityType(StrEnum):
    ON_DEMAND = "on-demand"
    SPOT = "spot"


class NodeType(Config):
    """A node type: its resources, its zones and its price."""

    name: str
    resources: dict[str, float]
    labels: dict[str, str] = Field(default_factory=dict)
    market: CapacityType = CapacityType.ON_DEMAND
    price_micro_usd_h: int = Field(ge=0)
    zone_prices_micro_usd_h: dict[str, int] = Field(default_factory=dict)
    """Prices of zones that differ from `price_micro_usd_h`."""
    zones: tuple[str, ...] = ("local",)
    min_nodes: int = Field(default=0, ge=0)
    max_nodes: int = Field(default=8, ge=0)
    warm_nodes: int = Field(default=0, ge=0)
    """Empty nodes kept ready ahead of demand."""
    idle_timeout_s: float = Field(default=60.0, ge=0)
    launch_timeout_s: float = Field(default=600.0, gt=0)
    """A node that has not joined by then is abandoned, and its pool backs off."""
    busy_above: dict[Meter, float] = Field(default_factory=dict)
    """Physical use, 0 to 1, above which a node that is idle in Ray stays. Only these meters exist on this type."""
    speed: float = Field(default=1.0, gt=0)
    """The speed of work on one of its GPUs (on the node, without any) relative to types of speed 1. Measurements of
    a job or an endpoint take precedence."""

    @model_validator(mode="after")
    def _bounds(self) -> NodeType:
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is above max_nodes {self.max_nodes}")
        if not self.zones:
            raise ValueError("a node type needs at least one zone")
        if any(amount < 0 for amount in self.resources.values()):
            raise ValueError("resources cannot be negative")
        return self

    def price_in(self, zone: str) -> int:
        return self.zone_prices_micro_usd_h.get(zone, self.price_micro_usd_h)

    def all_labels(self, zone: str) -> dict[str, str]:
        """Returns the labels of its nodes in Ray, market, zone and type included."""
        return {**self.labels, MARKET_LABEL: str(self.market), ZONE_LABEL: zone, TYPE_LABEL: self.name}


class NodeState(StrEnum):
    REQUESTED = "requested"  # the intent is persisted; the provider may or may not know it yet
    LAUNCHING = "launching"  # the provider has it, Ray does not
    READY = "ready"  # it joined Ray
    DRAINING = "draining"  # it takes no new work and leaves at its deadline or when idle
    TERMINATING = "terminating"  # the provider was asked to end it
    GONE = "gone"  # the provider ended it; it is billed until `ended_at_s`


@dataclass(frozen=True, slots=True)
class Node:
    """One machine through its whole life. Times are seconds since the epoch, None until they happen."""

    id: str
    type: str
    zone: str
    market: CapacityType
    price_micro_usd_h: int
    state: NodeState
    requested_at_s: float
    started_at_s: float | None = None
    """The start of the bill."""
    ready_at_s: float | None = None
    drain_deadline_s: float | None = None
    ended_at_s: float | None = None
    """The end of the bill."""
    lost_at_s: float | None = None
    """Since when Ray has not listed it as alive, although it had joined."""
    ray_node_id: str = ""
    address: str = ""
    subject: str = ""
    """The purpose it was bought for: a lease, an endpoint, `unmanaged` or `minimum`."""
    reason: str = ""
    """The reason for this state."""


def round_up_gpu_share(need: Resources) -> Resources:
    """Returns the resources that a member really takes: Ray never splits a share over two GPUs, so 0.4 of one is half
    of one."""
    share = need.get("GPU", 0.0)
    if not 0.0 < share < 1.0:
        return need
    return {**need, "GPU": 1.0 / int(1.0 / share + 1e-9)}


def fits(need: Resources, free: Resources) -> bool:
    """Returns True if `free` covers `need`; resources that `free` does not name count as zero."""
    return all(amount <= free.get(name, 0.0) + 1e-9 for name, amount in need.items())


def dominant_share(need: Resources, total: Resources) -> float:
    """Returns the largest share of any resource that `need` takes; resources that `total` lacks do not count."""
    return min(1.0, max((n / total[name] for name, n in need.items() if total.get(name)), default=0.0))


def minus(free: Resources, used: Resources) -> dict[str, float]:
    """Returns `free` without `used`; names that only `used` has become negative."""
    return {name: free.get(name, 0.0) - used.get(name, 0.0) for name in {**free, **used}}


def plus(first: Resources, second: Resources) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def add(total: dict[str, float], more: Resources) -> None:
    """Adds to `total` in place: for sums of many."""
    for name, amount in more.items():
        total[name] = total.get(name, 0.0) + amount


def labels_match(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Returns True if the labels match Ray's label selector: `v`, `!v`, `in(a,b)` and `!in(a,b)`; a missing label
    matches only the negated forms.
    """
    return all(_matches(want, labels.get(key)) for key, want in selector.items())


def _matches(want: str, have: str | None) -> bool:
    negated = want.startswith("!")
    body = want[1:] if negated else want
    wanted = [v.strip() for v in body[3:-1].split(",")] if body.startswith("in(") and body.endswith(")") else [body]
    return (have in wanted) != negated
