"""Best-fit packing: puts whole documents into rows of `seq_len` tokens (Ding et al., 2404.10830).

Long documents are first cut into full rows. The remaining pieces are placed longest first. A piece goes into the
fullest row with enough room, and among equally full rows into the one that was opened first. A plan therefore depends
only on the documents' lengths and is the same on any machine. Pieces of equal length are placed all at once, which
makes packing fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raytide.actors.trainer.data.order.shuffle import Ids


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """The pieces of documents in each row. The pieces are sorted by row, and within a row by the order of their
    placement.
    """

    seq_len: int
    starts: Ids
    """The first token of each piece in the dataset."""
    lengths: Ids
    first: Ids
    """The first piece of each row, and the number of pieces at the end."""

    @property
    def rows(self) -> int:
        return len(self.first) - 1

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def padding(self) -> float:
        """Returns the fraction of positions that hold no token."""
        return 1.0 - self.tokens / max(1, self.rows * self.seq_len)

    def pieces(self, row: int) -> tuple[Ids, Ids]:
        """Returns the starts and lengths of a row's pieces."""
        here = slice(int(self.first[row]), int(self.first[row + 1]))
        return self.starts[here], self.lengths[here]

    def attention_pairs(self, rows: Ids) -> Ids:
        """Returns, for each row, the sum of the squared lengths of the row's pieces. This is about twice the number of
        causal query-key pairs.
        """
        return np.fromiter((int((self.pieces(row)[1] ** 2).sum()) for row in rows), np.int64, len(rows))


def best_fit(starts: Ids, lengths: Ids, seq_len: int) -> PackingPlan:
    """Returns the packing plan for documents in dataset order. `starts` has the index of each document's first token.
    `lengths` has each document's number of tokens.
    """
    full = lengths // seq_len
    documents = np.repeat(np.arange(len(lengths)), full)
    ordinal = np.arange(len(documents)) - np.repeat(np.cumsum(full) - full, full)
    rest = lengths - full * seq_len
    left = np.flatnonzero(rest)
    order = left[np.argsort(-rest[left], kind="stable")]
    sizes = rest[order]
    rows = len(documents) + _place(sizes, seq_len)
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows - len(documents))
    return PackingPlan(
        seq_len,
        np.concatenate((starts[documents] + ordinal * seq_len, (starts + full * seq_len)[order][by_row])),
        np.concatenate((np.full(len(documents), seq_len, np.int64), sizes[by_row])),
        np.cumsum(np.concatenate((np.zeros(1, np.int64), np.ones(len(documents), np.int64), counts))),
    )


def _place(sizes: Ids, seq_len: int) -> Ids:
    """Returns the row of each piece. `sizes` must be in descending order, none above `seq_len`."""
    rows = np.empty(len(sizes), np.int64)
    by_room = _RowsByRoom(seq_len)
    ends = np.append(np.flatnonzero(np.diff(sizes)) + 1, len(sizes)) if len(sizes) else np.empty(0, np.int64)
    begin = 0
    for end in ends.tolist():
        size = int(sizes[begin])
        while begin < end:
            room = by_room.least(size)
            each = room // size  # a row stays the fullest with room until no further piece fits
            taken = by_room.take(room, -(-(end - begin) // each))
            count = min(end - begin, len(taken) * each)
            rows[begin : begin + count] = np.repeat(taken, each)[:count]
            begin += count
            partly = count % each
            by_room.put(room - each * size, taken[: len(taken) - (partly > 0)])
            if partly:
                by_room.put(room - partly * size, taken[-1:])
    return rows


class _RowsByRoom:
    """Open rows by their number of free tokens, first in, first out. A new row has `seq_len` free tokens."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len, self._opened = seq_len, 0
        self._queues: list[list[Ids]] = [[] for _ in range(seq_len)]
        self._some = np.zeros(seq_len, np.bool_)

    def least(self, size: int) -> int:
        """Returns the smallest number of free tokens, at least `size`, that some row has."""
        some = self._some[size:]
        at = int(some.argmax()) if len(some) else 0
        return size + at if len(some) and some[at] else self._seq_len

    def take(self, room: int, most: int) -> Ids:
        """Removes and returns between one and `most` rows with exactly `room` free tokens."""
        if room == self._seq_len:
            self._opened += most
            return np.arange(self._opened - most, self._opened)
        queue = self._queues[room]
        rows = queue[0]
        if len(rows) > most:
            queue[0] = rows[most:]
            return rows[:most]
        queue.pop(0)
        self._some[room] = bool(queue)
        return rows

    def put(self, room: int, rows: Ids) -> None:
        if room and len(rows):
            self._queues[room].append(rows)
            self._some[room] = True
