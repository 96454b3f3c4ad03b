"""The samples of each step of a mixture, with weights, caps and phases. They are a function of (seed, step), without
state.

Each sample of the run is the next row of one source. Each pass over a source visits the rows in a new order, which is a
Feistel permutation keyed by (seed, source, epoch). When a phase starts, the position in each source is computed in
closed form from the earlier phases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from raytide.actors.trainer.data.order.interleaving import Interleaving
from raytide.actors.trainer.data.order.shuffle import EVERYWHERE, Ids, Shuffle
from raytide.core.errors import DataError
from raytide.core.specs.mixture import MixtureSpec


@dataclass(frozen=True, slots=True)
class SourceSize:
    """The size of a mixture's source: its number of rows, and the number of tokens in the rows."""

    name: str
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a mixture: each source's share of the rows. The phase begins at sample `first` of the run."""

    first: int
    """The number of samples before this phase."""
    shares: tuple[float, ...]
    positions: tuple[int, ...]
    """The rows that each source has given before this phase, over all its epochs."""


@dataclass(frozen=True, slots=True)
class MixtureSampler:
    """Selects the rows of each step. The id of a row is the number of rows in all earlier sources, plus the row's index
    in its own source.
    """

    seed: int
    sources: tuple[SourceSize, ...]
    phases: tuple[Phase, ...]
    global_batch: int
    shuffle: Shuffle = EVERYWHERE

    def ids(self, step: int) -> Ids:
        """Returns the row ids of `step`, in order. They do not depend on other steps or on the rank."""
        first = step * self.global_batch
        phase = next(phase for phase in reversed(self.phases) if phase.first <= first)
        drawn, positions = _interleaving(phase.shares).draw(first - phase.first, self.global_batch)
        positions += np.asarray(phase.positions, np.int64)[drawn]
        out, offset = np.empty_like(positions), 0
        for index, source in enumerate(self.sources):
            mine = drawn == index
            if mine.any():
                epochs, places = positions[mine] // source.rows, positions[mine] % source.rows
                rows = np.empty_like(places)
                for epoch in np.unique(epochs):
                    now = epochs == epoch
                    rows[now] = self.shuffle.permute(places[now], source.rows, f"{self.seed}/{epoch}/{source.name}")
                out[mine] = rows + offset
            offset += source.rows
        return out

    def counts(self, step: int) -> dict[str, int]:
        """Returns, for each source, the number of its rows that are used before `step`."""
        samples = step * self.global_batch
        phase = next(phase for phase in reversed(self.phases) if phase.first <= samples)
        drawn = _interleaving(phase.shares).counts(samples - phase.first)
        return {s.name: p + d for s, p, d in zip(self.sources, phase.positions, drawn, strict=True)}


def resolve_phases(
    spec: MixtureSpec, sources: Sequence[SourceSize], global_batch: int, steps: int
) -> tuple[Phase, ...]:
    """Returns the phases of a run of `steps` steps. Raises DataError if the sources cannot give enough samples for all
    steps.
    """
    positions, phases = [0] * len(sources), list[Phase]()
    starts = [0, *(phase.from_step for phase in spec.phases)]
    for index, start in enumerate(starts):
        weights = _weights(spec, sources) if index == 0 else spec.phases[index - 1].weights
        end = starts[index + 1] if index + 1 < len(starts) else max(steps, start + 1)
        samples = max(0, min(end, max(steps, start + 1)) - start) * global_batch
        rows = _row_shares(weights, sources, spec.temperature)
        left = [_limit(spec, i, source, positions[i]) for i, source in enumerate(sources)]
        shares = capped_shares(rows, [limit / samples for limit in left])
        if shares is None:
            allowed = sum(limit for limit, share in zip(left, rows, strict=True) if share)
            raise DataError(
                f"max_epochs allows {math.floor(allowed)} more sequences from step {start} on, and the mixture needs "
                f"{samples}.",
                hint="Raise max_epochs, add a source, or lower steps.",
            )
        phases.append(Phase(start * global_batch, shares, tuple(positions)))
        if index + 1 < len(starts):
            drawn = _interleaving(shares).counts((end - start) * global_batch)
            positions = [a + b for a, b in zip(positions, drawn, strict=True)]
    return tuple(phases)


def capped_shares(shares: Sequence[float], limits: Sequence[float]) -> tuple[float, ...] | None:
    """Returns shares that sum to 1, none of them above its limit. The shares below their limits are in proportion to
    `shares`.

    This is UniMax's water-filling (Chung et al., 2304.09151), for arbitrary shares. Returns None if the limits sum to
    less than 1.
    """
    total = sum(shares)
    out = [share / total for share in shares]
    fixed = [share == 0 for share in shares]
    while over := [i for i, share in enumerate(out) if not fixed[i] and share > limits[i]]:
        for i in over:
            out[i], fixed[i] = limits[i], True
        free = 1.0 - sum(out[i] for i in range(len(out)) if fixed[i])
        open_total = sum(shares[i] for i in range(len(out)) if not fixed[i])
        if open_total == 0:
            return tuple(out) if free <= 1e-12 else None
        if free <= 0:
            return None
        for i in range(len(out)):
            if not fixed[i]:
                out[i] = free * shares[i] / open_total
    return tuple(out)


def _weights(spec: MixtureSpec, sources: Sequence[SourceSize]) -> Mapping[str, float]:
    return {
        size.name: given.weight if given.weight is not None else size.tokens * (given.epochs or 1.0)
        for given, size in zip(spec.sources, sources, strict=True)
    }


def _row_shares(weights: Mapping[str, float], sources: Sequence[SourceSize], temperature: float) -> list[float]:
    """Returns shares of rows. They differ from the weights, which are shares of tokens, because rows of some sources
    have more tokens than others.
    """
    tokens = [weights.get(source.name, 0.0) for source in sources]
    most = max(tokens)
    tempered = [_tempered(weight / most, temperature) for weight in tokens]
    rows = [share * source.rows / source.tokens for share, source in zip(tempered, sources, strict=True)]
    return [row / sum(rows) for row in rows]


def _tempered(share: float, temperature: float) -> float:
    """Returns share ** (1 / temperature), rounded, because the power's last digit differs between machines."""
    return share if temperature == 1.0 or share == 0 else round(share ** (1.0 / temperature), 12)


def _limit(spec: MixtureSpec, index: int, source: SourceSize, used: int) -> float:
    epochs = spec.sources[index].max_epochs or spec.max_epochs
    return math.inf if epochs is None else max(0.0, epochs * source.rows - used)


@lru_cache(maxsize=64)
def _interleaving(shares: tuple[float, ...]) -> Interleaving:
    """Returns the tree of the shares. It is cached, because it takes up to a second and a gang may form again."""
    return Interleaving(shares)
