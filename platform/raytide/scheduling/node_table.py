"""The free resources of all nodes in one array. A few array operations find the nodes that fit a shape.

Rows are in the order of node numbers, with new nodes last. The fitting nodes are ordered by three criteria: first those
that are usable soonest, then those with the least added fragmentation (FGD, ATC'23), then the fullest nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from raytide.core.objects.node import Resources, labels_match, round_up_gpu_share

GPU = "GPU"
SHORTLIST = 256
"""The number of tightest nodes that are compared by fragmentation."""

_EPS = 1e-9
_RANK = 1000.0
"""A bound above the sum of what can be left over on a node, in units of `scale`."""

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Need = tuple[tuple[int, float], ...]
"""The needed amounts, each with its column in the table."""


class NodeTable:
    """The free resources and labels of nodes as arrays, one row for each node.

    `scale` maps each resource to its largest amount on any one node. Amounts are divided by `scale`, so that a free
    GPU and a free CPU can be compared. `usual` lists the most frequent resource requests of members. Each request
    comes with its share of the members.
    """

    def __init__(self, scale: Resources, usual: Sequence[tuple[Resources, float]] = ()) -> None:
        self._column = {name: at for at, name in enumerate(sorted(scale))}
        self._per_scale = np.array([1.0 / max(scale[name], _EPS) for name in self._column])
        self._usual_KR = np.array([self._vector(need) for need, _ in usual]).reshape(len(usual), len(scale))
        self._weights_K = np.array([weight for _, weight in usual])
        self._free_RN = np.zeros((len(self._column), 64))
        self._rank = np.zeros(64, dtype=np.int64)
        self._labels: list[Mapping[str, str]] = []
        self._masks: dict[tuple[str, str], Mask] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def extend(self, free: Sequence[Resources], rank: Sequence[int], labels: Sequence[Mapping[str, str]]) -> None:
        """Appends nodes to the table. Negative amounts of free resources count as zero."""
        first, count = len(self), len(self) + len(free)
        while count > len(self._rank):
            self._free_RN = np.concatenate([self._free_RN, np.zeros_like(self._free_RN)], axis=1)
            self._rank = np.concatenate([self._rank, np.zeros_like(self._rank)])
            self._masks = {key: np.concatenate([mask, np.zeros_like(mask)]) for key, mask in self._masks.items()}
        for name, at in self._column.items():
            self._free_RN[at, first:count] = np.maximum(0.0, [amounts.get(name, 0.0) for amounts in free])
        self._rank[first:count] = rank
        self._labels.extend(labels)
        for (key, want), mask in self._masks.items():
            values = [each.get(key) for each in labels]
            known = {value: labels_match({key: want}, {} if value is None else {key: value}) for value in set(values)}
            mask[first:count] = [known[value] for value in values]

    def copy(self) -> NodeTable:
        other = copy(self)
        other._free_RN, other._labels = self._free_RN.copy(), list(self._labels)
        other._masks = {key: mask.copy() for key, mask in self._masks.items()}
        return other

    def reserve(self, row: int, need: Resources, count: int = 1) -> None:
        for name, amount in round_up_gpu_share(need).items():
            if (at := self._column.get(name)) is not None:
                self._free_RN[at, row] -= count * amount

    def reserve_each(self, rows: Sequence[int], need: Resources, counts: Sequence[int]) -> None:
        """Reserves the resources of `counts[i]` members in `rows[i]`, for each i. The rows must be distinct."""
        if len(rows) == 1:
            self.reserve(rows[0], need, counts[0])
            return
        for name, amount in round_up_gpu_share(need).items():
            if (at := self._column.get(name)) is not None:
                self._free_RN[at, rows] -= np.array(counts) * amount

    def release_columns(self, row: int, need: Need) -> None:
        for column, amount in need:
            self._free_RN[column, row] += amount

    def fitting(self, need: Resources, selector: Mapping[str, str], *, enough: int, but: int = -1) -> tuple[Rows, Rows]:
        """Returns the rows in which members fit, the best row first, and the number of members that fit in each row.

        The search stops when `enough` members fit. The row `but` is left out.
        """
        need = {name: amount for name, amount in round_up_gpu_share(need).items() if amount > 0}
        rows = self._able(need, selector)
        if but >= 0:
            rows = rows[rows != but]
        if len(rows) <= 1:
            return rows, self._copies(need, rows)
        free_RN, rank = self._free_RN[:, rows], self._rank[rows]
        key = (_RANK * rank + self._per_scale @ free_RN).round(9)
        first = _least(key, SHORTLIST)
        first = first[np.lexsort((self._fragmentation_by(free_RN[:, first], need), rank[first]))][
            :enough
        ]  # each holds one at least
        copies = self._copies(need, rows[first])
        if len(rows) > SHORTLIST and copies.sum() < enough:
            rest = np.argsort(key, kind="stable")[SHORTLIST:]
            first, copies = np.concatenate([first, rest]), np.concatenate([copies, self._copies(need, rows[rest])])
        return rows[first], copies

    def rows_with_room(self, need: Resources, selector: Mapping[str, str]) -> tuple[Rows, Rows]:
        """Returns the rows in which at least one member fits, in order, and the number of members that fit in each
        row.
        """
        need = {name: amount for name, amount in round_up_gpu_share(need).items() if amount > 0}
        rows = self._able(need, selector)
        return rows, self._copies(need, rows)

    def _able(self, need: Resources, selector: Mapping[str, str]) -> Rows:
        """Returns the rows in which one member fits; none if `need` is empty."""
        if not need or not need.keys() <= self._column.keys():
            return np.zeros(0, dtype=np.int64)
        count = len(self)
        enough = [self._free_RN[self._column[name], :count] >= amount - _EPS for name, amount in need.items()]
        matching = [self._mask(key, want)[:count] for key, want in selector.items()]
        return reduce(np.logical_and, [*enough, *matching]).nonzero()[0]

    def _copies(self, need: Resources, rows: Rows) -> Rows:
        if not len(rows):  # perhaps of something that no node has
            return rows
        copies = [(self._free_RN[self._column[name], rows] + _EPS) // amount for name, amount in need.items()]
        return reduce(np.minimum, copies).astype(np.int64) if copies else np.zeros(0, dtype=np.int64)

    def columns(self, need: Resources) -> Need:
        """Returns a pair (column, amount) for each resource in `need`. The result is empty if one of the resources
        exists on no node.
        """
        asked = {name: amount for name, amount in round_up_gpu_share(need).items() if amount > 0}
        if not asked.keys() <= self._column.keys():
            return ()
        return tuple((self._column[name], amount) for name, amount in asked.items())

    def free_at(self, row: int) -> list[float]:
        """Returns the free resources of a row, by column."""
        free: list[float] = self._free_RN[:, row].tolist()
        return free

    def is_ready(self, row: int) -> bool:
        return bool(self._rank[row] == 0)

    def matches(self, row: int, selector: Mapping[str, str]) -> bool:
        return all(self._mask(key, want)[row] for key, want in selector.items())

    def matching(self, selector: Mapping[str, str]) -> Mask:
        """Returns, for each row, whether the node's labels match the selector."""
        masks = [self._mask(key, want)[: len(self)] for key, want in selector.items()]
        return reduce(np.logical_and, masks, np.ones(len(self), dtype=np.bool_))

    def values(self, key: str, rows: Iterable[int]) -> set[str]:
        """Returns the set of values that the label `key` has on these nodes."""
        return {self._labels[row][key] for row in rows if key in self._labels[row]}

    def checkpoint(self) -> Callable[[], None]:
        """Returns a function that restores the free resources to their state at this call."""
        before = self._free_RN.copy()

        def restore() -> None:
            self._free_RN[:, : before.shape[1]] = before

        return restore

    def set_free(self, row: int, free: Resources, labels: Mapping[str, str]) -> None:
        """Replaces the free resources and the labels of a row."""
        self._free_RN[:, row], self._labels[row] = self._vector(free), labels
        for (key, want), mask in self._masks.items():
            mask[row] = labels_match({key: want}, labels)

    def share_taken(self, row: int, total: Resources) -> float:
        """Returns the used share of the most used resource on a node. `total` is the node's total resources."""
        return max(
            (1.0 - float(self._free_RN[self._column[n], row]) / amount for n, amount in total.items() if amount > 0),
            default=1.0,
        )

    def has_free(self, row: int, amounts: Resources) -> bool:
        return bool((self._free_RN[:, row] + _EPS >= self._vector(amounts)).all())

    def have_free(self, amounts: Sequence[Resources]) -> Mask:
        """Returns, for each row, whether the row's node has the resources `amounts[row]` free."""
        have = np.ones(len(amounts), dtype=np.bool_)
        for name, at in self._column.items():
            have &= self._free_RN[at, : len(amounts)] + _EPS >= [each.get(name, 0.0) for each in amounts]
        return have

    def _fragmentation_by(self, free_RN: Floats, need: Resources) -> Floats:
        """Returns how much one more member increases each node's fragmentation: GPUs that the usual members can no
        longer use.
        """
        gpu = self._column.get(GPU)
        if gpu is None or not len(self._weights_K) or not (has_gpus := free_RN[gpu] > _EPS).any():
            return np.zeros(free_RN.shape[1])
        after_RN = free_RN - self._vector(need)[:, None]
        stranded = self._fragmentation(np.concatenate([free_RN, after_RN], axis=1), gpu)
        before, after = stranded[: len(has_gpus)], stranded[len(has_gpus) :]
        return np.where(has_gpus, (after - before).round(9), 0.0)

    def _fragmentation(self, free_RN: Floats, gpu: int) -> Floats:
        """Returns the GPUs on each node that the usual members cannot use, on average."""
        lacks_KN = self._usual_KR[:, 0, None] > free_RN[0] + _EPS
        for at in range(1, len(free_RN)):
            lacks_KN |= self._usual_KR[:, at, None] > free_RN[at] + _EPS
        return np.asarray(self._weights_K @ lacks_KN * free_RN[gpu])

    def _mask(self, key: str, want: str) -> Mask:
        if (mask := self._masks.get((key, want))) is None:
            mask = np.zeros(len(self._rank), dtype=np.bool_)
            known: dict[str | None, bool] = {}
            for row, labels in enumerate(self._labels):
                value = labels.get(key)
                if value not in known:
                    known[value] = labels_match({key: want}, labels)
                mask[row] = known[value]
            self._masks[(key, want)] = mask
        return mask

    def _vector(self, amounts: Resources) -> Floats:
        vector = np.zeros(len(self._column))
        for name, amount in amounts.items():
            if (at := self._column.get(name)) is not None:
                vector[at] = amount
        return vector


def members_in(need: Need, free: Sequence[float]) -> int:
    """Returns the number of members that fit into `free`, the free resources of a node."""
    least = math.inf
    for column, amount in need:
        if (here := (free[column] + _EPS) // amount) < least:
            least = here
    return int(least) if least > 0 else 0


def _least(key: Floats, count: int) -> Rows:
    """Returns the indices of the `count` smallest keys, smallest first; ties by position."""
    if len(key) <= count:
        return np.argsort(key, kind="stable")
    near = np.flatnonzero(key <= np.partition(key, count - 1)[count - 1])
    return np.asarray(near[np.argsort(key[near], kind="stable")][:count])
