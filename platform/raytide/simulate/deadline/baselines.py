"""Published deadline policies as baselines: greedy, and Uniform Progress (NSDI'24).

Uniform Progress keeps the completed work in proportion to the elapsed time. Its three variants differ in the condition
for releasing an on-demand node:
- A: the job is ahead of schedule.
- B: the job is ahead of schedule and a spot zone is up.
- C: a spot zone is up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raytide.simulate.deadline.compare import NONE, ON_DEMAND, RunOutcome, Runs, Terms, TickPolicy, TickView, Up, replay


def greedy(terms: Terms) -> TickPolicy:
    """Returns a policy that uses spot nodes when a zone is up, and waits otherwise. The policy switches to an on-demand
    node when the deadline leaves no more time to wait.
    """

    def choose(view: TickView) -> int:
        if view.held != NONE:
            return view.held
        return ON_DEMAND if _is_short(terms, view) else _first(view, otherwise=NONE)

    return choose


def uniform_progress(leaves: Callable[[bool, bool], bool]) -> Callable[[Terms], TickPolicy]:
    """Returns the Uniform Progress policy. `leaves(is_ahead, has_spot)` returns True if the job should release its
    on-demand node.
    """

    def policy(terms: Terms) -> TickPolicy:
        pace = terms.work / terms.deadline

        def choose(view: TickView) -> int:
            if view.held >= 0:
                return view.held
            if _is_short(terms, view):
                return ON_DEMAND
            done = terms.work - view.work
            if view.held == ON_DEMAND:
                is_ahead = done >= pace * (view.tick + 2 * terms.restart)
                return _first(view, otherwise=NONE) if leaves(is_ahead, bool(view.up.any())) else ON_DEMAND
            return _first(view, otherwise=ON_DEMAND if done < pace * view.tick else NONE)

        return choose

    return policy


uniform_progress_a = uniform_progress(lambda is_ahead, has_spot: is_ahead)
uniform_progress_b = uniform_progress(lambda is_ahead, has_spot: is_ahead and has_spot)
uniform_progress_c = uniform_progress(lambda is_ahead, has_spot: has_spot)


def replayed(policy: Callable[[Terms], TickPolicy]) -> Runs:
    """Returns a function that runs a policy for a job. The policy sees nothing of the market before the job's start."""

    def runs(terms: Terms, up: Up) -> Callable[[int], RunOutcome]:
        return lambda start: replay(terms, up[:, start : start + terms.deadline], policy(terms))

    return runs


def _is_short(terms: Terms, view: TickView) -> bool:
    return terms.deadline - view.tick < view.work + 2 * terms.restart


def _first(view: TickView, *, otherwise: int) -> int:
    there = np.flatnonzero(view.up)
    return int(there[0]) if len(there) else otherwise
