"""The spot capacity of a simulation: how many nodes each zone can hold, as a step function of time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from raytide.simulate.serving.setup import ServingSetup
from raytide.simulate.spot import read, select, stacked


@dataclass(frozen=True, slots=True)
class SpotZones:
    """The capacity of spot zones over time. Row i of `capacity` is valid from `times_s[i]`, and has one column per
    zone.
    """

    names: tuple[str, ...]
    times_s: tuple[float, ...]
    capacity: tuple[tuple[int, ...], ...]

    def at(self, time_s: float) -> tuple[int, ...]:
        return self.capacity[max(0, bisect_right(self.times_s, time_s) - 1)]

    def most_in(self, start_s: float, end_s: float) -> tuple[int, ...]:
        """Returns the largest capacity of each zone between `start_s` and `end_s` (exclusive)."""
        first = max(0, bisect_right(self.times_s, start_s) - 1)
        rows = [row for row, at in zip(self.capacity[first:], self.times_s[first:], strict=True) if at < end_s]
        return tuple(max(column) for column in zip(*rows, strict=True))


def spot_zones(setup: ServingSetup) -> SpotZones:
    """Returns the spot capacity in a window of the recorded traces. Short traces repeat.

    The seed chooses the window, which is the same for all zones.
    """
    traces = select(
        read(setup.spot), setup.collection, gpu=setup.gpu, gpus_per_node=setup.gpus_per_node, kind=setup.kind
    )
    gap_s, nodes = traces[0].gap_s, stacked(traces) * setup.depth
    recorded = nodes.shape[1]
    ticks = int(np.ceil(setup.horizon_s / gap_s))
    first = int(np.random.default_rng([setup.seed, 2]).integers(max(recorded - ticks, 0) + 1))
    table = nodes[:, (first + np.arange(ticks)) % recorded].T
    keep = np.concatenate(([True], (np.diff(table, axis=0) != 0).any(axis=1)))
    return SpotZones(
        names=tuple(trace.zone for trace in traces),
        times_s=tuple((np.arange(ticks) * gap_s)[keep].tolist()),
        capacity=tuple(tuple(row) for row in table[keep].tolist()),
    )
