"""Node types that can be bought, nodes that were bought, and measurements of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from enum import StrEnum
from typing import Literal, get_args
from zoneinfo import ZoneInfo, available_timezones

from pydantic import Field, field_validator, model_validator

from raytide.core.config import Config

Resources = Mapping[str, float]
"""Ray's logical resources: {"CPU": 8, "GPU": 1, "memory": bytes}."""

MARKET_LABEL = "ray.io/market-type"
ZONE_LABEL = "ray.io/availability-zone"
TYPE_LABEL = "ray.io/node-group"
PROVIDER_LABEL = "raytide.io/provider"
ACCELERATOR_LABEL = "ray.io/accelerator-type"

FRESH_S = 10.0
"""The age above which a measurement of a node, replica or router cannot cause a scale-down."""

Meter = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Signal:
    """A measured or reported value, and its time."""

    value: float
    at_s: float
    """The time of the measurement, not of its reading."""

    def is_fresh(self, now_s: float) -> bool:
        return now_s - self.at_s <= FRESH_S


Use = Mapping[Meter, Signal]
"""Physical utilization of one node, 0 to 1: of all its CPUs together, and of its busiest GPU."""


@dataclass(frozen=True, slots=True)
class NodeReading:
    """The last values that Ray's agent and an exporter reported about a machine. A value that neither reports is
    None."""

    at_s: float
    memory_use: float | None = None
    """The share of the memory in use, 0 to 1; `disk_use` is the disk's."""
    disk_use: float | None = None
    network_in_bps: float | None = None
    """The bytes received a second; the three fields below have the bytes sent, read and written."""
    network_out_bps: float | None = None
    disk_read_bps: float | None = None
    disk_write_bps: float | None = None
    cores_used: float | None = None
    """The CPU-seconds used a second."""
    gpu_power_w: float | None = None
    """The power of all GPUs, as NVML measures it."""
    gpu_energy_j: float | None = None
    """NVML's counter of the energy of all GPUs since the driver was loaded, in joules."""
    cpu_energy_j: float | None = None
    """The energy of the CPU packages since the exporter started, in joules, by the kernel's RAPL counters."""
    oom_kills: float | None = None
    """The processes that the kernel has ended for lack of memory since the machine started."""
    clock_skew_s: float | None = None
    """The seconds by which the machine's clock is ahead of the reader's at least; 0 if the two may be equal."""


@dataclass(frozen=True, slots=True)
class NodeMeasurement:
    """The last measurement of a machine. It contains the machine's power in watts, and the energy in joules that it has
    used since the controller started. Both are listed by source.
    """

    reading: NodeReading
    power_w: Mapping[str, float]
    joules: Mapping[str, float]


class CapacityType(StrEnum):
    ON_DEMAND = "on-demand"
    SPOT = "spot"


Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = get_args(Weekday)
_DAY_MINUTES = 24 * 60


class ScheduledMinimum(Config):
    """The smallest number of nodes or replicas during some hours of some weekdays. The hours and weekdays are in a
    configured time zone.
    """

    min: int = Field(ge=0)
    days: tuple[Weekday, ...] = Field(default=WEEKDAYS, min_length=1)
    """The days on which the hours begin."""
    begin: str = Field(default="00:00", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    end: str = Field(default="24:00", pattern=r"^(([01]\d|2[0-3]):[0-5]\d|24:00)$")
    """The end of the hours; an end before the begin is on the next day."""
    time_zone: str = "UTC"
    """A name of the IANA database, such as `Europe/Berlin`."""

    @field_validator("begin", "end", mode="before")
    @classmethod
    def _minutes(cls, value: object) -> object:
        """Converts 1200, which YAML makes of an unquoted 20:00, back to the text 20:00."""
        is_minutes = isinstance(value, int) and 0 <= value <= _DAY_MINUTES
        return f"{value // 60:02}:{value % 60:02}" if is_minutes else value  # type: ignore[operator]

    @model_validator(mode="after")
    def _zone(self) -> ScheduledMinimum:
        try:
            _zone(self.time_zone)
        except (KeyError, ValueError, OSError):
            known = bool(available_timezones())
            why = "" if known else "; this machine knows only UTC: install its package of time zones, tzdata"
            raise ValueError(f"there is no time zone {self.time_zone!r}{why}") from None
        if self.begin == self.end:
            raise ValueError("begin and end are the same: leave both out for the whole day")
        return self

    def holds(self, at_s: float) -> bool:
        """Returns whether the schedule applies at the time `at_s` (seconds since the epoch). The schedule's days and
        hours are in its time zone.
        """
        local = datetime.fromtimestamp(at_s, _zone(self.time_zone))
        today, now = WEEKDAYS[local.weekday()], local.hour * 60 + local.minute
        begin, end = (int(text[:2]) * 60 + int(text[3:]) for text in (self.begin, self.end))
        if begin < end:
            return today in self.days and begin <= now < end
        yesterday = WEEKDAYS[local.weekday() - 1]
        return (today in self.days and now >= begin) or (yesterday in self.days and now < end)


def _zone(name: str) -> tzinfo:
    """Returns the time zone of this name. UTC is known without the IANA database, which small containers lack."""
    return UTC if name == "UTC" else ZoneInfo(name)


class NodeType(Config):
    """A type of node that can be bought: its resources, its zones and its price."""

    name: str
    resources: dict[str, float]
    labels: dict[str, str] = Field(default_factory=dict)
    market: CapacityType = CapacityType.ON_DEMAND
    price_micro_usd_h: int = Field(ge=0)
    zone_prices_micro_usd_h: dict[str, int] = Field(default_factory=dict)
    """The prices by zone, for zones whose price differs from `price_micro_usd_h`."""
    zones: tuple[str, ...] = ("local",)
    provider: str = ""
    """The name of its provider, in a cluster with several clouds; empty in others."""
    min_nodes: int = Field(default=0, ge=0)
    max_nodes: int = Field(default=8, ge=0)
    schedule: tuple[ScheduledMinimum, ...] = ()
    """Minimums that replace `min_nodes` in their hours; of several, the largest."""
    warm_nodes: int = Field(default=0, ge=0)
    """The number of empty nodes kept ready ahead of demand."""
    idle_timeout_s: float = Field(default=60.0, ge=0)
    launch_timeout_s: float = Field(default=600.0, gt=0)
    """The seconds after which a node that has not joined is abandoned; its pool then backs off."""
    busy_above: dict[Meter, float] = Field(default_factory=dict)
    """Physical use, from 0 to 1, by meter, above which a node is kept although it is idle in Ray. Only these meters
    exist on this type.
    """
    speed: float = Field(default=1.0, gt=0)
    """The speed of work on one of its GPUs (without GPUs, on the whole node), relative to types of speed 1.
    Measurements of a job or an endpoint take precedence.
    """
    gpu_memory_gb: float | None = Field(default=None, gt=0, le=10_000)
    """The memory of each of its GPUs in 10^9 bytes; by default the known size for its accelerator."""
    network_gbps: float | None = Field(default=None, gt=0, le=100_000)
    """The bandwidth of its network in 10^9 bits a second; by default the usual one for its accelerator. Only plans use
    it.
    """

    @model_validator(mode="after")
    def _bounds(self) -> NodeType:
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is above max_nodes {self.max_nodes}")
        if not self.zones:
            raise ValueError("a node type needs at least one zone")
        if any(amount < 0 for amount in self.resources.values()):
            raise ValueError("resources cannot be negative")
        return self

    def at(self, at_s: float) -> NodeType:
        """Returns the node type with the `min_nodes` that its schedule sets for this time. The value is at most
        `max_nodes`. If the schedule has no entry for this time, `min_nodes` is unchanged.
        """
        minimums = [entry.min for entry in self.schedule if entry.holds(at_s)]
        if not minimums:
            return self
        return self.model_copy(update={"min_nodes": min(max(minimums), self.max_nodes)})

    def price_in(self, zone: str) -> int:
        return self.zone_prices_micro_usd_h.get(zone, self.price_micro_usd_h)

    def all_labels(self, zone: str) -> dict[str, str]:
        """Returns the labels that Ray shows for nodes of this type in this zone. They include the market, zone, type
        and provider."""
        labels = {**self.labels, MARKET_LABEL: str(self.market), ZONE_LABEL: zone, TYPE_LABEL: self.name}
        return {**labels, PROVIDER_LABEL: self.provider} if self.provider else labels


class NodeState(StrEnum):
    REQUESTED = "requested"  # the intent is persisted; the provider may or may not know it yet
    LAUNCHING = "launching"  # the provider has it, Ray does not
    READY = "ready"  # it joined Ray
    DRAINING = "draining"  # it takes no new work and leaves at its deadline or when idle
    TERMINATING = "terminating"  # the provider was asked to end it
    GONE = "gone"  # the provider ended it; it is billed until `ended_at_s`


@dataclass(frozen=True, slots=True)
class Node:
    """One machine through its whole life. Times are seconds since the epoch, or None for events that have not
    happened."""

    id: str
    type: str
    zone: str
    market: CapacityType
    price_micro_usd_h: int
    state: NodeState
    requested_at_s: float
    started_at_s: float | None = None
    """The time at which the provider's bill starts."""
    ready_at_s: float | None = None
    drain_deadline_s: float | None = None
    ended_at_s: float | None = None
    """The time at which the provider's bill ends."""
    lost_at_s: float | None = None
    """The time since which Ray has not listed the node as alive, although it had joined; None while it is listed."""
    ray_node_id: str = ""
    address: str = ""
    subject: str = ""
    """The purpose it was bought for: a lease, an endpoint, `unmanaged` or `minimum`."""
    reason: str = ""
    """The reason for this state."""
    quarantined: str = ""
    """The reason why an operator or an alert keeps the node out of use; empty if it is not in quarantine."""


def round_up_gpu_share(need: Resources) -> Resources:
    """Returns the resources that a member really takes: Ray never splits a share over two GPUs, so 0.4 GPU takes half a
    GPU.
    """
    share = need.get("GPU", 0.0)
    if not 0.0 < share < 1.0:
        return need
    return {**need, "GPU": 1.0 / int(1.0 / share + 1e-9)}


def fits(need: Resources, free: Resources) -> bool:
    """Returns True if the amounts in `free` cover those in `need`. A resource that `free` does not name counts as
    zero."""
    return all(amount <= free.get(name, 0.0) + 1e-9 for name, amount in need.items())


def dominant_share(need: Resources, total: Resources) -> float:
    """Computes for each resource the share of `total` that `need` takes, and returns the largest share. Resources that
    `total` does not have are ignored."""
    return min(1.0, max((n / total[name] for name, n in need.items() if total.get(name)), default=0.0))


def minus(free: Resources, used: Resources) -> dict[str, float]:
    """Returns `free` minus `used`, by resource. A resource that only `used` names gets a negative amount."""
    return {name: free.get(name, 0.0) - used.get(name, 0.0) for name in {**free, **used}}


def plus(first: Resources, second: Resources) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def add(total: dict[str, float], more: Resources) -> None:
    """Adds `more` to `total` in place, which avoids copies when many amounts are added up."""
    for name, amount in more.items():
        total[name] = total.get(name, 0.0) + amount


def labels_match(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Returns True if the labels match Ray's label selector, with `v`, `!v`, `in(a,b)` and `!in(a,b)`. A missing label
    matches only the negated forms."""
    return all(_matches(want, labels.get(key)) for key, want in selector.items())


def _matches(want: str, have: str | None) -> bool:
    negated = want.startswith("!")
    body = want[1:] if negated else want
    wanted = [v.strip() for v in body[3:-1].split(",")] if body.startswith("in(") and body.endswith(")") else [body]
    return (have in wanted) != negated
