"""Computes the expected cost to finish a job with a deadline, for each state of the job and the market. Uses dynamic
programming with a learned model of the spot market.

Time and work are counted in steps. A step is at least as long as one restart, and a running job does one unit of
work per step. The slack is the time until the deadline minus the remaining work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytide.autoscaler.spot.availability_model import AGES_S, BANDS, Floats, ReclaimRates

NONE, SPOT, ON_DEMAND = range(3)
INFEASIBLE = 1e6
FAR_STEP = 2.0
"""The step for distant deadlines, in restart times. A start counts as a whole step: with longer ones, no spot node
would be worth its start.
"""
KEPT_SLACK = 8.0
"""The slack in steps that a job keeps when it is shortened to the size of the table: time for a few starts."""
STATES = 2 * BANDS
"""The number of states of the market, which counts as one zone: up, by age band (0 .. BANDS-1), or down, by age band
(BANDS .. STATES-1).
"""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """A table of the expected costs to finish a job. The unit of all costs is the price of one on-demand node for one
    step.
    """

    cost: NDArray[np.float32]
    """Indexed by steps until the deadline, mode, market state and steps of remaining work."""
    zone_hazard: Floats
    """Reclaims per second by zone and age band, to compare zones."""
    kept: Floats
    """Transition probabilities between market states over one step in which the held zone stays up."""
    moved: Floats
    """The same probabilities for a step in which the held zone is lost, or in which no zone was up."""
    step_s: float
    price_ratio: float
    """The spot price divided by the on-demand price."""
    max_left: int
    """The size of the table in steps; `steps_of` shortens a job that is longer."""

    def steps_of(self, slack_s: float, work_s: float) -> tuple[float, float]:
        """Returns the slack and the work of a job in steps. If the job is longer than the table, returns those of a
        shorter job with the same share of slack, because this share decides the best action now. Up to `KEPT_SLACK`
        steps of slack are kept.
        """
        slack, work = slack_s / self.step_s, work_s / self.step_s
        half = (self.max_left - 2) / 2
        if slack + work <= 2 * half or work <= half:
            return slack, work
        return max(slack * half / work, min(slack, KEPT_SLACK)), half

    def at(self, mode: int, slack: float, work: float) -> Floats:
        """Returns the expected cost for each market state. The costs are interpolated between table points. `slack` and
        `work` are in steps.
        """
        if work <= 0:
            return np.zeros(STATES)
        slack = min(slack, self.max_left - np.ceil(work - 1e-9) - 1)  # more slack is worth no less
        low, first = int(np.floor(slack + 1e-9)), int(np.floor(work + 1e-9))
        right, ahead = max(0.0, slack - low), max(0.0, work - first)
        corners = [(low, first), (low, first + 1), (low + 1, first), (low + 1, first + 1)]
        shares = [(1 - right) * (1 - ahead), (1 - right) * ahead, right * (1 - ahead), right * ahead]
        used = [(s + w, w, share) for (s, w), share in zip(corners, shares, strict=True) if share > 1e-9]
        lefts, works, weights = zip(*used, strict=True)
        return np.asarray(np.asarray(weights) @ self.cost[lefts, mode, :, works])


def step_of(restart_s: float, left_s: float, most_steps: int) -> float:
    """Returns the step of a job's table. The step is one restart if a table of `most_steps` steps then reaches to the
    deadline. Otherwise it is `FAR_STEP` restarts, and `Values.steps_of` shortens a job that is still too long.
    """
    return restart_s if left_s <= most_steps * restart_s else FAR_STEP * restart_s


def solve(market: ReclaimRates, *, left_s: float, work_s: float, restart_s: float, price_ratio: float) -> Values:
    """Returns the cost table for all states with at most `left_s` until the deadline and at most `work_s` of remaining
    work.
    """
    lefts, works = int(np.ceil(left_s / restart_s)) + 2, int(np.ceil(work_s / restart_s)) + 1
    kept, moved = _transitions(market, restart_s)
    cost = np.full((lefts + 1, 3, STATES, works + 1), INFEASIBLE, dtype=np.float32)
    work = np.arange(works + 1)
    for left in range(lefts + 1):
        now = cost[left]
        now[:, :, 0] = 0
        if left:
            _step(now, cost[left - 1], kept, moved, left - work, price_ratio)
    return Values(cost, market.zone_hazard, kept, moved, restart_s, price_ratio, lefts)


def _step(
    now: NDArray[np.float32],
    after: NDArray[np.float32],
    kept: Floats,
    moved: Floats,
    slack: NDArray[np.int64],
    price_ratio: float,
) -> None:
    """Fills `now`, one step of the table, with the lowest cost of waiting, starting and continuing for each remaining
    work.
    """
    idle = (kept + moved) @ after[NONE]
    spot = price_ratio + kept @ after[SPOT] + moved @ after[NONE]
    demand = 1 + (kept + moved) @ after[ON_DEMAND]
    none = np.minimum(idle, demand)
    none[:BANDS] = np.minimum(none[:BANDS], spot[:BANDS])
    none = np.where(slack >= 2, none, np.where(slack >= 1, demand, INFEASIBLE))
    now[NONE, :, 1:] = none[:, 1:]
    now[ON_DEMAND, :, 1:] = np.minimum(none[:, 1:], np.where(slack[1:] >= 0, demand[:, :-1], INFEASIBLE))
    now[SPOT, :BANDS, 1:] = np.minimum(none[:BANDS, 1:], np.where(slack[1:] >= 1, spot[:BANDS, :-1], INFEASIBLE))
    np.minimum(now, INFEASIBLE, out=now)


def _transitions(market: ReclaimRates, step_s: float) -> tuple[Floats, Floats]:
    """Returns the transition probabilities (kept, moved) of `Values`. Ages are assumed to be spread evenly within a
    band.
    """
    widths = np.append(np.diff(AGES_S), np.inf)
    older = np.minimum(1.0, step_s / widths)
    ends = market.lost + market.switched.sum(axis=1)
    survives = np.exp(-ends * step_s)
    gone = (1 - survives) / ends
    kept, moved = np.zeros((STATES, STATES)), np.zeros((STATES, STATES))
    stays_out = np.exp(-market.found * step_s)
    for band in range(BANDS):
        kept[band, band] += survives[band] * (1 - older[band])
        moved[BANDS + band, BANDS + band] += stays_out[band] * (1 - older[band])
        if band + 1 < BANDS:
            kept[band, band + 1] += survives[band] * older[band]
            moved[BANDS + band, BANDS + band + 1] += stays_out[band] * older[band]
        moved[band, :BANDS] += market.switched[band] * gone[band]
        moved[band, BANDS] += market.lost[band] * gone[band]
        moved[BANDS + band, 0] += 1 - stays_out[band]
    return kept, moved
