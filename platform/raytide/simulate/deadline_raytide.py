"""raytide's deadline policy on a recorded market: the production decision, fed with what was seen up to each tick."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raytide.autoscaler.deadline import DeadlineJob, ZoneView, decide
from raytide.autoscaler.deadline_values import Values, solve
from raytide.autoscaler.spells import Market, Spells
from raytide.simulate.deadline import NONE, ON_DEMAND, Outcome, Policy, Terms, Up, View, replay

LEARN_EVERY_S = 6 * 3600.0
"""How often the market is learned anew and the values with it."""


def raytide(terms: Terms, up: Up) -> Callable[[int], Outcome]:
    """The market was watched since the trace began."""
    every = max(1, int(LEARN_EVERY_S / terms.tick_s))
    markets, ages_s = _watch(up, terms.tick_s, every)
    known: dict[int, Values] = {}

    def values(tick: int) -> Values:
        if tick // every not in known:
            known.clear()  # a table is large, and runs go forward
            known[tick // every] = _solve(markets[tick // every], terms)
        return known[tick // every]

    return lambda start: replay(
        terms,
        up[:, start : start + terms.deadline],
        _policy(terms, ages_s[:, start:], lambda tick: values(start + tick)),
    )


def _policy(terms: Terms, ages_s: np.ndarray, values: Callable[[int], Values]) -> Policy:
    def choose(view: View) -> int:
        job = DeadlineJob(
            left_s=(terms.deadline - view.tick) * terms.tick_s,
            work_s=view.work * terms.tick_s,
            restart_s=terms.restart * terms.tick_s,
            tick_s=terms.tick_s,
            held=None if view.held == NONE else "on_demand" if view.held == ON_DEMAND else view.held,
            starting_s=view.starting * terms.tick_s,
        )
        zones = [ZoneView(bool(up), float(age)) for up, age in zip(view.up, ages_s[:, view.tick], strict=True)]
        held = decide(job, zones, values(view.tick)).held
        return NONE if held is None else ON_DEMAND if held == "on_demand" else held

    return choose


def _watch(up: Up, tick_s: float, every: int) -> tuple[list[Market], np.ndarray]:
    """What was learned by the first tick of each period, and each zone's age in its state at each tick."""
    spells = Spells(len(up))
    markets, ages_s = [], np.empty(up.shape)
    for tick in range(up.shape[1]):
        if tick % every == 0:
            markets.append(spells.market())
        spells.observe(tick * tick_s, up[:, tick])
        ages_s[:, tick] = spells.ages_s()
    return markets, ages_s


def _solve(market: Market, terms: Terms) -> Values:
    return solve(
        market,
        slack_s=(terms.deadline - terms.work) * terms.tick_s,
        work_s=terms.work * terms.tick_s,
        restart_s=terms.restart * terms.tick_s,
        price_ratio=terms.spot_usd_h / terms.ondemand_usd_h,
    )
