"""The lowest cost at which a buyer who knows the whole trace finishes in time. No policy can cost less.

This cost is computed by dynamic programming backward over the ticks, for all amounts of remaining work at once. A
node is started only if its zone stays up until the start is complete. An interrupted start would cost money and do
no work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from raytide.simulate.deadline.compare import ON_DEMAND, RunOutcome, Terms, Up


def optimal(terms: Terms, up: Up) -> Callable[[int], RunOutcome]:
    """Returns a function that runs the optimal policy. This policy never misses the deadline, because a job that uses
    only an on-demand node finishes in time.
    """
    return lambda start: RunOutcome(cheapest_usd(terms, up[:, start : start + terms.deadline]))


def cheapest_usd(terms: Terms, up: Up) -> float:
    """Returns the least possible cost, by the recursion V(tick, held, work left) = min(continue, start another, hold
    nothing).
    """
    holds = (ON_DEMAND, *range(len(up)))
    ticks = up.shape[1]
    free = np.full(terms.work + 1, np.inf)
    free[0] = 0
    # by allocation, from the next tick to the end of a restart
    ahead = deque([np.tile(free, (len(holds), 1))], maxlen=terms.restart)
    for tick in range(ticks - 1, -1, -1):
        started = tick + terms.restart
        for row, held in enumerate(holds):
            if started < ticks and _lives(up, held, tick, started):
                np.minimum(free, terms.restart * terms.usd(held) + ahead[-1][row], out=free)
        free[0] = 0
        ready = np.tile(free, (len(holds), 1))
        for row, held in enumerate(holds):
            if _lives(up, held, tick, tick + 1):
                np.minimum(ready[row, 1:], terms.usd(held) + ahead[0][row, :-1], out=ready[row, 1:])
        ahead.appendleft(ready)
    return float(free[terms.work])


def _lives(up: Up, held: int, first: int, end: int) -> bool:
    return held == ON_DEMAND or bool(up[held, first:end].all())
