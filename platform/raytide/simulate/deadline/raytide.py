"""raytide's deadline policy on a recorded spot market. The production code decides, and sees the market only up to the
current tick.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from raytide.autoscaler.deadlines.policy import DeadlineJob, ZoneView, decide
from raytide.autoscaler.deadlines.value_iteration import Values, solve, step_of
from raytide.autoscaler.spot.availability_model import AvailabilityModel, Floats, ReclaimRates
from raytide.simulate.deadline.compare import NONE, ON_DEMAND, RunOutcome, Terms, TickPolicy, TickView, Up, replay

MOST_STEPS = 512
"""The size of the value table in steps: twice that of a live cluster, which solves tables for many jobs."""


def raytide(terms: Terms, up: Up) -> Callable[[int], RunOutcome]:
    """Returns a function that runs raytide's deadline policy for a job. The policy's market model has observed the
    market since the start of the trace.
    """
    ticks, markets, ages_s = _watch(up, terms.tick_s)

    def from_start(start: int) -> RunOutcome:
        def market(tick: int) -> ReclaimRates:
            return markets[bisect_right(ticks, start + tick) - 1]

        return replay(terms, up[:, start : start + terms.deadline], _policy(terms, ages_s[:, start:], market))

    return from_start


def _policy(terms: Terms, ages_s: Floats, market: Callable[[int], ReclaimRates]) -> TickPolicy:
    known: list[tuple[ReclaimRates, Values]] = []

    def values(job: DeadlineJob, tick: int) -> Values:
        now = market(tick)
        if not known or known[0][0] is not now:
            price_ratio = terms.spot_usd_h / terms.ondemand_usd_h
            step_s = step_of(job.restart_s, job.left_s, MOST_STEPS)
            left_s, work_s = (min(long_s, MOST_STEPS * step_s) for long_s in (job.left_s, job.work_s))
            table = solve(now, left_s=left_s, work_s=work_s, restart_s=step_s, price_ratio=price_ratio)
            known[:] = [(now, table)]
        return known[0][1]

    def choose(view: TickView) -> int:
        job = DeadlineJob(
            left_s=(terms.deadline - view.tick) * terms.tick_s,
            work_s=view.work * terms.tick_s,
            restart_s=terms.restart * terms.tick_s,
            tick_s=terms.tick_s,
            allocation=None if view.held == NONE else "on_demand" if view.held == ON_DEMAND else view.held,
            starting_s=view.starting * terms.tick_s,
        )
        zones = [ZoneView(bool(up), float(age)) for up, age in zip(view.up, ages_s[:, view.tick], strict=True)]
        held = decide(job, zones, values(job, view.tick))
        return NONE if held is None else ON_DEMAND if held == "on_demand" else held

    return choose


def _watch(up: Up, tick_s: float) -> tuple[Sequence[int], Sequence[ReclaimRates], Floats]:
    """Returns the ticks at which the rates change, the new rates, and for each tick how long each zone has been up or
    down.
    """
    model = AvailabilityModel(len(up))
    ticks, markets = [0], [model.cached_rates(0.0)]
    ages_s = np.empty(up.shape)
    for tick in range(up.shape[1]):
        if (market := model.cached_rates(tick * tick_s)) is not markets[-1]:
            ticks.append(tick)
            markets.append(market)
        model.observe(tick * tick_s, up[:, tick])
        ages_s[:, tick] = model.ages_s()
    return ticks, markets, ages_s
