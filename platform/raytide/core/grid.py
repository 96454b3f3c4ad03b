"""Free resources of all nodes in one table, so that those that fit a shape are found in a few array operations.

Rows are in the order of the nodes' numbers; new ones are added at the end. Among nodes that fit, those come first that
are usable soonest, then those on which least is cut to pieces (FGD, ATC'23), then the tightest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from raytide.core.fleet import Resources, labels_match, whole_shares

_EPS = 1e-9
GPU = "GPU"

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Grid:
    """`scale`: the most of each resource that one node can have, to compare a GPU left over with a CPU left over.

    `popular`: what members usually ask for, with how many of them there are.
    """

    def __init__(self, scale: Resources, popular: Sequence[tuple[Resources, float]] = ()) -> None:
        self._column = {name: at for at, name in enumerate(sorted(scale))}
        self._scale = np.array([max(scale[name], _EPS) for name in self._column])
        self._popular = [(self._vector(need), weight) for need, weight in popular]
        self._free_RN = np.zeros((len(self._column), 64))
        self._rank = np.zeros(64, dtype=np.int64)
        self._labels: list[Mapping[str, str]] = []
        self._masks: dict[tuple[str, str], Mask] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def add(self, free: Resources, rank: int, labels: Mapping[str, str]) -> int:
        """The row of one more node."""
        row = len(self._labels)
        if row == len(self._rank):
            self._free_RN = np.concatenate([self._free_RN, np.zeros_like(self._free_RN)], axis=1)
            self._rank = np.concatenate([self._rank, np.zeros_like(self._rank)])
            self._masks = {key: np.concatenate([mask, np.zeros_like(mask)]) for key, mask in self._masks.items()}
        self._free_RN[:, row], self._rank[row] = self._vector(free), rank
        self._labels.append(labels)
        for (key, want), mask in self._masks.items():
            mask[row] = labels_match({key: want}, labels)
        return row

    def copy(self) -> Grid:
        other = copy(self)
        other._free_RN, other._labels = self._free_RN.copy(), list(self._labels)
        other._masks = {key: mask.copy() for key, mask in self._masks.items()}
        return other

    def take(self, row: int, need: Resources, count: int = 1) -> None:
        for name, amount in whole_shares(need).items():
            if (at := self._column.get(name)) is not None:
                self._free_RN[at, row] -= count * amount

    def fitting(self, need: Resources, selector: Mapping[str, str], *, but: int = -1) -> tuple[Rows, Rows]:
        """Rows with room, the best first, and how many members each would hold."""
        need = {name: amount for name, amount in whole_shares(need).items() if amount > 0}
        none = np.zeros(0, dtype=np.int64)
        if not need or not need.keys() <= self._column.keys():
            return none, none
        asked = [(self._column[name], amount) for name, amount in need.items()]
        able = np.ones(len(self), dtype=np.bool_)
        for at, amount in asked:
            able &= self._free_RN[at, : len(self)] >= amount - _EPS
        for key, want in selector.items():
            able &= self._mask(key, want)[: len(self)]
        if but >= 0:
            able[but] = False
        rows = np.flatnonzero(able)
        if not rows.size:
            return none, none
        free_RN = self._free_RN[:, rows]
        copies = np.min([(free_RN[at] + _EPS) // amount for at, amount in asked], axis=0).astype(np.int64)
        left = (free_RN / self._scale[:, None]).sum(axis=0).round(9)
        order = np.lexsort((rows, left, self._cut(free_RN, need), self._rank[rows]))
        return rows[order], copies[order]

    def values(self, key: str, rows: Iterable[int]) -> set[str]:
        """Of a label, on those nodes that have it."""
        return {self._labels[row][key] for row in rows if key in self._labels[row]}

    def undo(self) -> Callable[[], None]:
        """Call the result to have the free resources as they are now."""
        before = self._free_RN.copy()

        def restore() -> None:
            self._free_RN[:, : before.shape[1]] = before

        return restore

    def set_free(self, row: int, free: Resources, labels: Mapping[str, str]) -> None:
        """The node of this row is another one from now on."""
        self._free_RN[:, row], self._labels[row] = self._vector(free), labels
        for (key, want), mask in self._masks.items():
            mask[row] = labels_match({key: want}, labels)

    def share_taken(self, row: int, total: Resources) -> float:
        """Of the scarcest resource of a node that has `total`."""
        return max(
            (1.0 - float(self._free_RN[self._column[n], row]) / amount for n, amount in total.items() if amount > 0),
            default=1.0,
        )

    def is_untouched(self, row: int, total: Resources) -> bool:
        return bool((self._free_RN[:, row] + _EPS >= self._vector(total)).all())

    def _cut(self, free_RN: Floats, need: Resources) -> Floats:
        """GPUs that the usual members could no longer use there, for one member placed."""
        more = np.zeros(free_RN.shape[1])
        gpu = self._column.get(GPU)
        if gpu is None or not self._popular or not (cut := free_RN[gpu] > _EPS).any():
            return more
        before_RN = free_RN[:, cut]
        after_RN = before_RN - self._vector(need)[:, None]
        for ask, weight in self._popular:
            stranded = np.where((after_RN + _EPS >= ask[:, None]).all(axis=0), 0.0, after_RN[gpu])
            stranded -= np.where((before_RN + _EPS >= ask[:, None]).all(axis=0), 0.0, before_RN[gpu])
            more[cut] += weight * stranded
        return more.round(9)

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
