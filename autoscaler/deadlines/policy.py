"""Which node a job with a deadline should hold now: a spot zone, an on-demand node, or none.

Pure. Two rules make the deadline: nothing is risked that could leave too little time to finish on demand, that start
included; within that, the cheapest expected way to the end is taken, by the values of the learned market.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raytide.autoscaler.deadlines.value_iteration import NONE, ON_DEMAND, SPOT, Values
from raytide.autoscaler.spot.availability_model import BANDS, band

Allocation = int | Literal["on_demand"] | None
"""The index of a spot zone, an on-demand node, or nothing."""
Action = Literal["stay", "wait", "spot", "on_demand"]

_EVEN = 1e-6
"""Costs nearer than this are equal; then the job stays where it is."""
_S = 1e-3
"""Times nearer than this are equal."""


@dataclass(frozen=True, slots=True)
class DeadlineJob:
    """A job that must be done in time. All times in seconds."""

    left_s: float
    """Until the deadline."""
    work_s: float
    """What is still to be done, on one node."""
    restart_s: float
    """What a start takes at most until work goes on where it was."""
    tick_s: float
    """Until this is decided again."""
    allocation: Allocation = None
    starting_s: float = 0.0
    """What the start of the held node still takes."""

    @property
    def slack_s(self) -> float:
        return self.left_s - self.work_s


@dataclass(frozen=True, slots=True)
class ZoneView:
    is_up: bool
    age_s: float
    """How long it has been up, or gone."""


@dataclass(frozen=True, slots=True)
class DeadlineDecision:
    action: Action
    allocation: Allocation
    """What to hold until the next decision."""
    reason: str


def decide(job: DeadlineJob, zones: Sequence[ZoneView], values: Values) -> DeadlineDecision:
    """What to hold until the next tick. A held zone that is gone counts as nothing held."""
    held = None if isinstance(job.allocation, int) and not zones[job.allocation].is_up else job.allocation
    costs = _costs(job, held, zones, values)
    if not costs:
        late = (
            f"{job.work_s / 3600:.1f} h of work and {job.left_s / 3600:.1f} h left: no time for anything but on demand"
        )
        return DeadlineDecision("stay" if held == "on_demand" else "on_demand", "on_demand", late)
    choice = min(costs, key=lambda name: (costs[name], name != held))
    if held in costs and costs[held] <= costs[choice] + _EVEN:
        choice = held
    return DeadlineDecision(_action(choice, held), choice, _reason(choice, costs, values))


def _costs(job: DeadlineJob, held: Allocation, zones: Sequence[ZoneView], values: Values) -> dict[Allocation, float]:
    """Expected cost to the end of each thing that may be held without a risk to the deadline."""
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
        for index, zone in enumerate(zones):
            if zone.is_up and index != held:
                costs[index] = _expected_cost(SPOT, job, job.restart_s, band(zone.age_s), values)
    if job.slack_s - job.tick_s >= job.restart_s - _S:
        costs[None] = _expected_cost(NONE, job, 0.0, around, values)
    return costs


def _expected_cost(mode: int, job: DeadlineJob, starting_s: float, state: int, values: Values) -> float:
    """Hold this until its start is over, and for a tick at least; then go on as is best."""
    taken = max(job.tick_s, starting_s) / values.step_s
    done = 0.0 if mode == NONE else taken - starting_s / values.step_s
    slack, work = job.slack_s / values.step_s - (taken - done), job.work_s / values.step_s - done
    passed = min(1.0, taken)
    here, without = values.at(mode, slack, work), values.at(NONE, slack, work) if mode == SPOT else None
    if without is None:
        after = (values.kept[state] + values.moved[state]) @ here
    else:
        after = values.kept[state] @ here + values.moved[state] @ without
    price = (0.0, values.price_ratio, 1.0)[mode]
    return float(price * taken + (1 - passed) * here[state] + passed * after)


def _market_state(zones: Sequence[ZoneView], values: Values) -> int:
    """The market's state for who holds none of it: its best zone, or how long there has been none."""
    there = [index for index, zone in enumerate(zones) if zone.is_up]
    if not there:
        return BANDS + band(min(zone.age_s for zone in zones))
    best = min(there, key=lambda index: (values.zone_hazard[index, band(zones[index].age_s)], -zones[index].age_s))
    return band(zones[best].age_s)


def _action(choice: Allocation, held: Allocation) -> Action:
    if choice is None:
        return "wait"
    if choice == held:
        return "stay"
    return "on_demand" if choice == "on_demand" else "spot"


def _reason(choice: Allocation, costs: dict[Allocation, float], values: Values) -> str:
    hours = {name: f"{cost * values.step_s / 3600:.2f}" for name, cost in costs.items()}
    others = [f"{_name(name)} {hours[name]}" for name in sorted(costs, key=lambda name: costs[name]) if name != choice]
    against = f", with {', '.join(others)}" if others else ""
    return f"with {_name(choice)} the rest costs what {hours[choice]} h on demand cost{against}"


def _name(held: Allocation) -> str:
    return "no node" if held is None else "an on-demand node" if held == "on_demand" else f"spot in zone {held}"
