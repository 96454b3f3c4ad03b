"""The queue of sequences that do not run: each is either queued in order of service, or parked until an event."""

from __future__ import annotations

from collections.abc import Container, Iterator
from heapq import heapify, heappop, heappush

from raytide.actors.engine.scheduler.policy import SchedulingPolicy
from raytide.actors.engine.sequence import Sequence

_Entry = tuple[bool, float, int, Sequence]
"""True if the sequence is new, False if it has begun (here or on another engine); its due time in seconds; its arrival
number; the sequence. The first three order the sequences of a priority, and stay fixed while a sequence waits.
"""


class WaitingQueue:
    """The waiting sequences. There is one heap for each pair of priority and team. To find the next sequence, only the
    head of each heap is inspected.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heaps: dict[tuple[int, str], list[_Entry]] = {}
        self._entries: dict[str, _Entry] = {}  # of those not parked; an entry of a heap that is not here is stale
        self._parked: dict[str | bytes, dict[str, Sequence]] = {}
        self._parked_on: dict[str, str | bytes] = {}
        self._stale = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._parked_on)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._entries or seq.seq_id in self._parked_on

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all sequences by priority and order of service; parked ones last."""
        queued = sorted(self._entries.values(), key=lambda entry: (self._policy.priority(entry[3]), *entry[:3]))
        yield from [entry[3] for entry in queued]
        for parked in list(self._parked.values()):
            yield from list(parked.values())

    def push(self, seq: Sequence) -> None:
        is_new = seq.starts == 0 and (seq.output_len == 0 or seq.gave_way)
        entry = (is_new, self._policy.due_s(seq), seq.arrival, seq)
        self._entries[seq.seq_id] = entry
        heappush(self._heaps.setdefault((self._policy.priority(seq), seq.team), []), entry)

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence, parked or not."""
        key = self._parked_on.pop(seq.seq_id, None)
        if key is not None:
            del self._parked[key][seq.seq_id]
            if not self._parked[key]:
                del self._parked[key]
            return
        del self._entries[seq.seq_id]
        self._stale += 1
        if self._stale > 64 + len(self._entries):
            self._sweep()

    def head(self, now_s: float, teams: Container[str] | None = None) -> Sequence | None:
        """Returns the sequence that is served next, or None if there is none. If `teams` is given, only sequences of
        these teams count.
        """
        best = None
        for key, heap in list(self._heaps.items()):
            if teams is not None and key[1] not in teams:
                continue
            while heap and self._entries.get(heap[0][3].seq_id) is not heap[0]:
                heappop(heap)
                self._stale -= 1
            if not heap:
                del self._heaps[key]
                continue
            newcomer, due_s, arrival, seq = heap[0]
            order = (self._policy.level(seq, now_s), newcomer, due_s, arrival, seq)
            best = order if best is None else min(best, order)
        return best[4] if best is not None else None

    def park(self, seq: Sequence, key: str | bytes) -> None:
        """Sets a queued sequence aside until `wake(key)` is called."""
        self.remove(seq)
        self._parked_on[seq.seq_id] = key
        self._parked.setdefault(key, {})[seq.seq_id] = seq

    def wake(self, key: str | bytes) -> None:
        for seq in self._parked.pop(key, {}).values():
            del self._parked_on[seq.seq_id]
            self.push(seq)

    def _sweep(self) -> None:
        for key, heap in list(self._heaps.items()):
            heap[:] = [entry for entry in heap if self._entries.get(entry[3].seq_id) is entry]
            heapify(heap)
            if not heap:
                del self._heaps[key]
        self._stale = 0
