"""Simulates one job with a deadline on a recorded spot market, in whole ticks of the trace.

A start takes `restart` ticks, which are billed but do no work. A zone that is up at a tick can be held for the whole
tick. If a held zone goes down, the node is lost at the start of the tick. No completed work is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytide.core.errors import DataError, UsageError
from raytide.simulate.spot import SpotTrace, stacked

NONE = -1
ON_DEMAND = -2
"""The allocation of an on-demand node. An allocation is NONE, ON_DEMAND or the index of a zone."""

Up = NDArray[np.bool_]
"""The availability of spot, indexed by zone and tick: True where the zone is up."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The work, the restart time and the deadline of a job, in ticks of `tick_s` seconds, and the prices of its
    node.
    """

    work: int
    restart: int
    deadline: int
    tick_s: float
    spot_usd_h: float = 0.918
    ondemand_usd_h: float = 3.06

    @classmethod
    def of(cls, hours: float, restart_h: float, slack: float, tick_s: float) -> Terms:
        """Returns the terms of a job with `hours` hours of work.

        The time from the job's start to the deadline is `hours` * (1 + `slack`) hours plus one restart.
        """
        work = max(1, round(hours * 3600 / tick_s))
        restart = max(1, round(restart_h * 3600 / tick_s))
        return cls(work, restart, int(work * (1 + slack) + 1e-9) + restart, tick_s)

    def usd(self, held: int) -> float:
        """Returns the price of one tick for the allocation `held`."""
        price_usd_h = 0.0 if held == NONE else self.ondemand_usd_h if held == ON_DEMAND else self.spot_usd_h
        return price_usd_h * self.tick_s / 3600

    @property
    def ondemand_usd(self) -> float:
        """The cost of running the whole job on an on-demand node."""
        return self.usd(ON_DEMAND) * (self.work + self.restart)


@dataclass(frozen=True, slots=True)
class TickView:
    """The data that a policy sees at one tick. If the held zone was just lost, `held` is NONE."""

    tick: int
    """The number of ticks since the job's start."""
    work: int
    """The remaining work in ticks."""
    held: int
    starting: int
    """The remaining start-up ticks of `held`."""
    up: NDArray[np.bool_]
    """The availability of spot by zone."""


TickPolicy = Callable[[TickView], int]
"""A function that returns the allocation for this tick: NONE, ON_DEMAND or a zone that is up."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    cost_usd: float
    is_missed: bool = False


Runs = Callable[[Terms, Up], Callable[[int], RunOutcome]]
"""A function from a job's terms and a market to a function that returns the outcome by start tick. The market before
that tick may be known.
"""


def replay(terms: Terms, up: Up, policy: TickPolicy) -> RunOutcome:
    """Runs a job under a policy until the work is done. `up` tells in which zones and ticks spot nodes are available.

    After the deadline the job runs on an on-demand node.
    """
    held, starting, work, cost_usd, tick = NONE, 0, terms.work, 0.0, 0
    while work:
        if tick >= terms.deadline:
            late = work + (starting if held == ON_DEMAND else terms.restart)
            return RunOutcome(cost_usd + late * terms.usd(ON_DEMAND), is_missed=True)
        now = up[:, tick]
        if held >= 0 and not now[held]:
            held, starting = NONE, 0
        choice = policy(TickView(tick, work, held, starting, now))
        if choice >= 0 and not now[choice]:
            raise ValueError(f"the policy holds zone {choice}, which is not up at tick {tick}")
        if choice != held:
            held, starting = choice, 0 if choice == NONE else terms.restart
        cost_usd += terms.usd(held)
        if starting:
            starting -= 1
        elif held != NONE:
            work -= 1
        tick += 1
    return RunOutcome(cost_usd)


def starts(ticks: int, terms: Terms, count: int) -> list[int]:
    """Returns the start ticks of `count` runs, spread evenly over the trace. The deadline of every run is within the
    trace.
    """
    room = ticks - terms.deadline
    if room < 0:
        raise DataError(
            f"the trace has {ticks} ticks and one run needs {terms.deadline}.",
            hint="Ask for fewer hours or less slack.",
        )
    return [int(start) for start in np.linspace(0, room, count)]


@dataclass(frozen=True, slots=True)
class DeadlineReport:
    policy: str
    collection: str
    zones: list[str]
    slack: float
    hours: float
    restart_h: float
    tick_s: float
    starts: int
    cost_vs_ondemand: float
    """The mean cost over the starts, relative to the job's on-demand cost."""
    cost_vs_ondemand_worst: float
    missed_deadlines: int


def run(
    traces: Sequence[SpotTrace],
    runs: Runs,
    *,
    policy: str,
    collection: str,
    slack: float,
    hours: float,
    restart_h: float,
    count: int,
) -> DeadlineReport:
    """Simulates `count` jobs under a policy, with starts spread evenly over the traces.

    Returns the mean and the largest cost relative to the on-demand cost, and the number of missed deadlines. `slack` is
    relative to `hours`.
    """
    is_sane = count >= 1 and 0 < hours < math.inf and 0 <= slack < math.inf and 0 < restart_h < math.inf
    if not is_sane:
        raise UsageError("--starts, --hours and --restart-hours are above zero, and --slack is not below it.")
    terms = Terms.of(hours, restart_h, slack, traces[0].gap_s)
    up = stacked(traces) > 0
    from_start = runs(terms, up)
    outcomes = [from_start(start) for start in starts(up.shape[1], terms, count)]
    shares = [outcome.cost_usd / terms.ondemand_usd for outcome in outcomes]
    return DeadlineReport(
        policy=policy,
        collection=collection,
        zones=[trace.zone for trace in traces],
        slack=slack,
        hours=hours,
        restart_h=restart_h,
        tick_s=terms.tick_s,
        starts=count,
        cost_vs_ondemand=sum(shares) / count,
        cost_vs_ondemand_worst=max(shares),
        missed_deadlines=sum(outcome.is_missed for outcome in outcomes),
    )
