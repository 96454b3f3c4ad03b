"""Forecasts how a live cluster continues if no new work is submitted: its node launches, the starts of waiting jobs,
and the cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from raytide.core.errors import UsageError
from raytide.core.money import cumulative, to_us
from raytide.core.objects.job import JobState
from raytide.core.objects.plan import Plan, Wait
from raytide.core.objects.snapshot import Snapshot
from raytide.simulate.live.world import LiveWorld

USUAL_LAUNCH_S = 120.0
_SHORTEST_S, _LONGEST_S = 1.0, 10.0
"""The bounds of the time between two ticks, in seconds: the lower one after a tick with changes, then doubling."""


@dataclass(frozen=True, slots=True)
class JobStart:
    job_id: str
    name: str
    after_s: float | None
    """The seconds until it starts; None if it does not start within the forecast."""
    waits_for: str
    """The reason of its last wait; "" if it never waited."""


@dataclass(frozen=True, slots=True)
class Outlook:
    at_s: float
    hours: float
    launch_s: float
    """The assumed time from the launch of a node until it joins."""
    job_hours: float | None
    plans: tuple[Plan, ...]
    """Plans with an action, or with a new reason to wait."""
    jobs: tuple[JobStart, ...]
    """The start of every waiting job."""
    price_now_micro_usd_h: int
    price_most_micro_usd_h: int
    price_end_micro_usd_h: int
    cost_micro_usd: int
    """The cost of all nodes during the forecast."""


def look_ahead(
    seen: Snapshot, *, hours: float = 1.0, launch_s: float | None = None, job_hours: float | None = None
) -> Outlook:
    """Runs the production decisions forward from this snapshot on a virtual clock. Returns the plans, job starts and
    costs.

    New nodes join after `launch_s` seconds (default: the median of the cluster's own nodes). Jobs end `job_hours` after
    their start (default: never).
    """
    is_sane = 0 < hours < math.inf and 0 <= (launch_s or 0.0) < math.inf
    if not is_sane or not (job_hours is None or job_hours > 0):
        raise UsageError("hours must be finite and above 0, job hours above 0, launch time finite and 0 or more.")
    launch_s = usual_launch_s(seen) if launch_s is None else launch_s
    world = LiveWorld(seen, launch_s=launch_s, job_s=None if job_hours is None else job_hours * 3600)
    prices = [world.price_micro_usd_h()]
    plans: list[Plan] = []
    reasons: dict[str, str] = {}
    step_s, end_s = 0.0, seen.at_s + hours * 3600  # the first pass is now
    while True:
        plan = world.step(step_s)
        waits = {action.subject: action.reason for action in plan.actions if isinstance(action, Wait)}
        is_news = any(not isinstance(action, Wait) for action in plan.actions) or waits.items() - reasons.items()
        if is_news:
            plans.append(plan)
        reasons |= waits
        prices.append(world.price_micro_usd_h())
        left_s = end_s - world.clock.now_s()
        if left_s <= 0:
            break
        step_s = min(left_s, _SHORTEST_S if is_news else max(_SHORTEST_S, min(2 * step_s, _LONGEST_S)))
    return Outlook(
        at_s=seen.at_s,
        hours=hours,
        launch_s=launch_s,
        job_hours=job_hours,
        plans=tuple(plans),
        jobs=tuple(_starts(seen, world, reasons)),
        price_now_micro_usd_h=prices[0],
        price_most_micro_usd_h=max(prices),
        price_end_micro_usd_h=prices[-1],
        cost_micro_usd=_cost_micro_usd(world, seen.at_s),
    )


def usual_launch_s(seen: Snapshot) -> float:
    """Returns the median time in seconds from the decision to launch a node until the node joined the cluster.

    If no node has joined yet, returns a fixed default.
    """
    took_s = [
        view.node.ready_at_s - view.node.requested_at_s for view in seen.nodes if view.node.ready_at_s is not None
    ]
    return median(took_s) if took_s else USUAL_LAUNCH_S


def _starts(seen: Snapshot, world: LiveWorld, reasons: dict[str, str]) -> list[JobStart]:
    starts = []
    for job in seen.jobs:
        if job.state in (JobState.QUEUED, JobState.ADMITTED) and not job.stop_requested:
            at_s = world.book.jobs[job.id].started_at_s
            after_s = None if at_s is None else max(0.0, at_s - seen.at_s)
            starts.append(JobStart(job.id, job.spec.name, after_s, reasons.get(job.id, "")))
    return starts


def _cost_micro_usd(world: LiveWorld, since_s: float) -> int:
    cost = 0
    for machine in world.provider.machines():
        ended_s = world.clock.now_s() if machine.ended_at_s is None else machine.ended_at_s
        began_s = max(since_s, machine.started_at_s)
        cost += cumulative(machine.price_micro_usd_h, to_us(began_s), max(to_us(began_s), to_us(ended_s)))
    return cost
