"""Divides one stream of samples among weighted sources. The source of any sample is computed from the sample's index
alone, in closed form and without state.

The sources are the leaves of a binary tree. Of the first k samples that reach a node, round(k * left / total) go left.
Here `left` is the weight of the left subtree and `total` that of the node. The arithmetic uses integers, so that each
sample has exactly one leaf, and one position in that leaf's source.

The number of samples at a leaf stays close to the leaf's exact share: an error e at a node becomes p * e + 1/2 at a
child with share p. In Google's library grain (`_counts_per_dataset`, github.com/google/grain) the tree is a chain, and
the errors of many sources add up. Here the tree's shape keeps the errors small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np

from raytide.actors.trainer.data.order.shuffle import Ids

_GRID = 20
"""While a tree is shaped, errors are rounded up to multiples of 1 / _GRID samples."""
PRECISION = 1 << 40
"""The total of the integers to which weights are rounded, so that the order drifts by one sample in 1e12."""
MOST_AT_ONCE = 1 << 20
"""The most samples of one pass of `draw`; with PRECISION it keeps products below 2**63."""


@dataclass(frozen=True, slots=True)
class _Node:
    left: _Node | int
    right: _Node | int
    left_weight: int
    weight: int

    def lefts(self, first: int, count: int) -> Ids:
        """Returns, for k from `first` to `first` + `count`, how many of the first k samples go left."""
        whole, rest = divmod(2 * first * self.left_weight + self.weight, 2 * self.weight)
        steps = np.arange(count + 1, dtype=np.int64) * (2 * self.left_weight)
        return whole + (rest + steps) // (2 * self.weight)


class Interleaving:
    """The order in which samples are drawn from sources with the given shares. A source with share 0 is never drawn."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.weights = integer_weights(shares)
        order = sorted((i for i, weight in enumerate(self.weights) if weight), key=lambda i: -self.weights[i])
        self._tree = _tree(order, self.weights)

    def draw(self, first: int, count: int) -> tuple[Ids, Ids]:
        """Returns two arrays for the `count` samples from index `first` on: the source of each sample, and the sample's
        position in its source.
        """
        sources, positions = np.empty(count, np.int64), np.empty(count, np.int64)
        for begin in range(0, count, MOST_AT_ONCE):
            part = slice(begin, min(begin + MOST_AT_ONCE, count))
            places = np.arange(part.start, part.stop, dtype=np.int64)
            self._draw(self._tree, first + begin, places, sources, positions)
        return sources, positions

    def counts(self, index: int) -> tuple[int, ...]:
        """Returns how many of the first `index` samples come from each source."""
        counts = [0] * len(self.weights)
        todo = [(self._tree, index)]
        while todo:
            node, samples = todo.pop()
            if isinstance(node, int):
                counts[node] = samples
            else:
                left = int(node.lefts(samples, 0)[0])
                todo += [(node.left, left), (node.right, samples - left)]
        return tuple(counts)

    def _draw(self, node: _Node | int, first: int, places: Ids, sources: Ids, positions: Ids) -> None:
        """Fills in the samples at `places`. At this node they have consecutive indices, which start at `first`."""
        if isinstance(node, int):
            sources[places] = node
            positions[places] = np.arange(first, first + len(places))
        elif len(places):
            lefts = node.lefts(first, len(places))
            goes_left, before = np.diff(lefts) > 0, int(lefts[0])
            self._draw(node.left, before, places[goes_left], sources, positions)
            self._draw(node.right, first - before, places[~goes_left], sources, positions)


def integer_weights(shares: Sequence[float]) -> tuple[int, ...]:
    """Returns integers in proportion to `shares`. A share above 0 becomes at least 1."""
    total = sum(shares)
    return tuple(max(1, round(share / total * PRECISION)) if share > 0 else 0 for share in shares)


def _tree(order: Sequence[int], weights: Sequence[int]) -> _Node | int:
    """Returns the tree over the sources, in the given order (descending weight), whose largest error is least.

    Dynamic programming over ranges of `order` and the error at a range's node, rounded up to a multiple of 1 / _GRID.
    """
    sums = [0, *accumulate(weights[i] for i in order)]

    @cache
    def best(begin: int, end: int, grid: int) -> tuple[float, int]:
        """Returns the least error bound of a range whose node has the error grid / _GRID, and the place of its cut."""
        if end - begin == 1:
            return grid / _GRID, begin
        total, least, at = sums[end] - sums[begin], math.inf, begin
        for cut in range(begin + 1, end):
            left = (sums[cut] - sums[begin]) / total
            below = math.ceil(left * grid + _GRID / 2), math.ceil((1 - left) * grid + _GRID / 2)
            if max(below) / _GRID >= least:
                continue
            bound = best(begin, cut, below[0])[0]
            if bound < least and (bound := max(bound, best(cut, end, below[1])[0])) < least:
                least, at = bound, cut
        return least, at

    def build(begin: int, end: int, grid: int) -> _Node | int:
        if end - begin == 1:
            return order[begin]
        cut, total = best(begin, end, grid)[1], sums[end] - sums[begin]
        left = sums[cut] - sums[begin]
        grids = (math.ceil(each / total * grid + _GRID / 2) for each in (left, total - left))
        return _Node(build(begin, cut, next(grids)), build(cut, end, next(grids)), left, total)

    return build(0, len(order), 0)
