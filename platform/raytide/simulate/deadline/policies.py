"""All deadline policies of the simulation, by name."""

from __future__ import annotations

from raytide.core.errors import UsageError
from raytide.simulate.deadline.baselines import (
    greedy,
    replayed,
    uniform_progress_a,
    uniform_progress_b,
    uniform_progress_c,
)
from raytide.simulate.deadline.compare import Runs
from raytide.simulate.deadline.optimal import optimal
from raytide.simulate.deadline.raytide import raytide

POLICIES: dict[str, Runs] = {
    "greedy": replayed(greedy),
    "uniform-progress-a": replayed(uniform_progress_a),
    "uniform-progress-b": replayed(uniform_progress_b),
    "uniform-progress-c": replayed(uniform_progress_c),
    "uniform-progress": replayed(uniform_progress_c),
    "optimal": optimal,
    "raytide": raytide,
}
"""The policies by name. `uniform-progress` is its variant C, the cheapest on most markets."""


def policy(name: str) -> Runs:
    if name not in POLICIES:
        raise UsageError(f"no deadline policy {name!r}.", hint=f"There are: {', '.join(POLICIES)}.")
    return POLICIES[name]
