"""Decides which node a job with a deadline should hold now: a node in a spot zone, an on-demand node, or none.

There are two rules. First, a choice is allowed only if it leaves enough time to start the job on an on-demand node
later and to finish it before the deadline. Second, the cheapest allowed choice wins: the one whose expected cost
until the job's end is lowest. The expected costs come from a table that is computed from the learned spot market
(`value_iteration.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raytide.autoscaler.deadlines.value_iteration import NONE, ON_DEMAND, SPOT, Values
from raytide.autoscaler.spot.availability_model import BANDS, band

Allocation = int | Literal["on_demand"] | None
"""The index of a spot zone, an on-demand node, or no node."""

_EVEN = 1e-6
"""Costs that differ by less than this count as equal; then the job stays where it is."""
_S = 1e-3
"""Times that differ by less than this, in seconds, count as equal."""


@dataclass(frozen=True, slots=True)
class DeadlineJob:
    """A job with a deadline, as the policy sees it."""

    left_s: float
    """Time until the deadline."""
    work_s: float
    """The seconds that the remaining work takes on one node."""
    restart_s: float
    """The longest time that a start takes until the job is back at its present step."""
    tick_s: float
    """Time until the next decision."""
    allocation: Allocation = None
    starting_s: float = 0.0
    """Remaining start time of the held node."""

    @property
    def slack_s(self) -> float:
        return self.left_s - self.work_s


@dataclass(frozen=True, slots=True)
class ZoneView:
    is_up: bool
    age_s: float
    """Seconds for which the zone has been up, or down."""


def decide(job: DeadlineJob, zones: Sequence[ZoneView], values: Values) -> Allocation:
    """Returns the allocation that the job should hold until the next tick. If the job's spot zone is down, the job is
    treated as holding no node.
    """
    held = None if isinstance(job.allocation, int) and not zones[job.allocation].is_up else job.allocation
    costs = _costs(job, held, zones, values)
    if not costs:
        return "on_demand"  # no other choice can still finish in time
    choice = min(costs, key=lambda name: (costs[name], name != held))
    return held if held in costs and costs[held] <= costs[choice] + _EVEN else choice


def _costs(job: DeadlineJob, held: Allocation, zones: Sequence[ZoneView], values: Values) -> dict[Allocation, float]:
    """Returns, for each allocation that does not risk the deadline, the expected cost until the job has finished."""
    costs: dict[Allocation, float] = {}
    starting_s = 0.0 if held is None else job.starting_s
    around = _market_state(zones, values)
    if held == "on_demand":
        costs[held] = _expected_cost(ON_DEMAND, job, starting_s, around, values)
    elif job.slack_s >= job.restart_s - _S:
        costs["on_demand"] = _expected_cost(ON_DEMAND, job, job.restart_s, around, values)
    if held is not None and held != "on_demand" and job.slack_s - starting_s >= job.restart_s - _S:
        costs[held] = _expected_cost(SPOT, job, starting_s, band(zones[held].age_s), values)
    if job.slack_s >= 2 * job.restart_s - _S:
        by_band: dict[int, float] = {}  # zones of one age band cost the same
        for index, zone in enumerate(zones):
            if zone.is_up and index != held:
                age_band = band(zone.age_s)
                if age_band not in by_band:
                    by_band[age_band] = _expected_cost(SPOT, job, job.restart_s, age_band, values)
                costs[index] = by_band[age_band]
    if job.slack_s - job.tick_s >= job.restart_s - _S:
        costs[None] = _expected_cost(NONE, job, 0.0, around, values)
    return costs


def _expected_cost(mode: int, job: DeadlineJob, starting_s: float, state: int, values: Values) -> float:
    """Returns the cost of holding this mode until it has started, at least for a tick, and then acting optimally."""
    taken = max(job.tick_s, starting_s) / values.step_s
    done = 0.0 if mode == NONE else taken - starting_s / values.step_s
    slack, work = values.steps_of(job.slack_s, job.work_s)
    slack, work = slack - (taken - done), work - done
    passed = min(1.0, taken)
    here, without = values.at(mode, slack, work), values.at(NONE, slack, work) if mode == SPOT else None
    if without is None:
        after = (values.kept[state] + values.moved[state]) @ here
    else:
        after = values.kept[state] @ here + values.moved[state] @ without
    price = (0.0, values.price_ratio, 1.0)[mode]
    return float(price * taken + (1 - passed) * here[state] + passed * after)


def _market_state(zones: Sequence[ZoneView], values: Values) -> int:
    """Returns the market's state for a job that holds no zone: the age band of the best zone, or of the drought if no
    zone is up.
    """
    there = [index for index, zone in enumerate(zones) if zone.is_up]
    if not there:
        return BANDS + band(min(zone.age_s for zone in zones))
    best = min(there, key=lambda index: (values.zone_hazard[index, band(zones[index].age_s)], -zones[index].age_s))
    return band(zones[best].age_s)
