"""In-memory snapshots. Every rank keeps a copy of its own state, and a copy of the state of a peer on another host.

When members are lost, the survivors load the newest snapshot that is still complete, without touching storage. The new
gang may have any layout. A `Snapshots` object outlives generations of ranks. It joins a generation at the start and
leaves it at the end.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from raytide.actors.trainer.checkpoint.async_save import BackgroundTask
from raytide.actors.trainer.checkpoint.peers import replication
from raytide.actors.trainer.checkpoint.peers.replication import SnapshotCopy, SnapshotId
from raytide.actors.trainer.checkpoint.peers.reshard import SnapshotReader
from raytide.actors.trainer.checkpoint.staging import BufferEntry, StagingBuffer
from raytide.actors.trainer.checkpoint.train_state import TrainState
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.core.errors import CheckpointError
from raytide.core.specs.train import TrainSpec

CLOSE_S = 2.0


@dataclass(slots=True)
class _Slot:
    """The copies that this process holds of one snapshot."""

    snapshot: SnapshotId | None = None
    elements: int = 0
    own: StagingBuffer = field(default_factory=StagingBuffer)
    own_rank: int = 0
    has_own: bool = False
    peer: StagingBuffer = field(default_factory=StagingBuffer)
    """The copy of the peer's shards that this rank holds."""
    peer_rank: int = 0
    has_peer: bool = False
    is_in_use: bool = False
    """True while a thread of a broken generation may still read `own`."""


@dataclass(slots=True)
class _Exchange:
    """Exchanges the copies in one generation. Its thread may outlive the generation, so it holds no process group but
    its own: a group stays open while any thread holds it.
    """

    channel: dist.ProcessGroup
    rank: int
    world: int
    peers: list[int]
    layouts: list[list[BufferEntry]] = field(default_factory=list)
    """Entries of each rank's copy, constant for a layout."""
    elements: int = 0

    def run(self, slot: _Slot) -> None:
        slot.own.wait()
        if not self.layouts:
            layouts: list[list[BufferEntry]] = [[]] * self.world
            dist.all_gather_object(layouts, slot.own.entries, group=self.channel)
            self.elements = replication.count_elements(entry for layout in layouts for entry in layout)
            self.layouts = layouts
        slot.elements, slot.has_own = self.elements, True
        if self.world == 1:
            return
        slot.peer_rank = self.peers.index(self.rank)
        slot.peer.allocate(self.layouts[slot.peer_rank])
        sent = dist.isend(slot.own.used, self.peers[self.rank], group=self.channel)
        arrives = dist.irecv(slot.peer.used, slot.peer_rank, group=self.channel)
        assert sent is not None and arrives is not None
        arrives.wait()
        slot.has_peer = True
        sent.wait()
        dist.all_reduce(torch.zeros(1), group=self.channel)  # from here on the previous snapshot is not needed


SHARE = 0.01
"""The part of the training time that snapshots may cost."""
FIRST = 10
"""The number of steps between snapshots before anything is measured."""
MOST = 1000
HALF_LIFE = 16
"""Half-life of the averages, in samples."""
UNDISTURBED_EVERY = 64
"""If a snapshot is due after every step, one in this many steps is left out, since only a step without one shows what
snapshots cost.
"""


@dataclass(slots=True)
class Average:
    value: float = 0.0
    samples: int = 0

    def add(self, sample: float) -> None:
        """Adds a sample to the average. The first samples have equal weights. Later, the weight of old samples halves
        every HALF_LIFE samples.
        """
        self.samples += 1
        self.value += (sample - self.value) * max(1 / self.samples, 1 - 0.5 ** (1 / HALF_LIFE))


class SnapshotCadence:
    """Decides when a snapshot is due. All ranks record the same measurements and reach the same decision.

    The cost of a snapshot has two parts. The first part is the time for which a step waits: for the copy, and for an
    earlier exchange that is still running. The second part is the time by which the background exchange slows down
    other steps.
    """

    def __init__(self, every: int = FIRST) -> None:
        self.every = every
        self._alone, self._beside, self._stall = Average(), Average(), Average()
        self._undisturbed_at = 0

    def record(self, step_s: float, stall_s: float, is_beside: bool) -> None:
        """Records the measurements of one step: its duration, the time that it waited for a snapshot, and whether an
        exchange ran at the same time.
        """
        (self._beside if is_beside else self._alone).add(step_s)
        if stall_s:
            self._stall.add(stall_s)
        if self._alone.samples and self._beside.samples:
            slower_s = max(0.0, self._beside.value - self._alone.value)
            cost_s = self._stall.value + slower_s
            self.every = max(1, min(MOST, math.ceil(cost_s / (SHARE * max(self._alone.value, 1e-9)))))

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether to take a snapshot after `step`. `last` is the step of the last snapshot."""
        if step - last < self.every:
            return False
        if self.every == 1 and step - self._undisturbed_at >= UNDISTURBED_EVERY:
            self._undisturbed_at = step
            return False
        return True


class Snapshots:
    """Snapshots of the training state. All ranks must call `join`, `save`, `find_newest` and `load` together. The other
    methods are local.

    The host memory needed is four times a rank's share of the state. There are two snapshots, because the older one is
    needed until the newer one is complete everywhere. Each snapshot has the rank's own copy and a peer's copy.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._slots = [_Slot(), _Slot()]
        self._current = 0
        self._task = BackgroundTask("snapshot")
        self._group: ProcessGroup | None = None
        self._exchange: _Exchange | None = None
        self._generation = ""
        self._digests: tuple[tuple[str, str], ...] = ()
        self._copies: list[SnapshotCopy] = []
        self._selected: SnapshotId | None = None
        self.cadence = SnapshotCadence()
        self._stall_s, self._is_beside = 0.0, False

    def join(self, group: ProcessGroup, digests: Mapping[str, str] | None = None) -> None:
        """Joins the process group of a generation. Assigns to each rank the peer that holds the copy of the rank's
        state. `digests` are those of what the generation reads, the same on all ranks.
        """
        self._group, self._digests = group, tuple(sorted((digests or {}).items()))
        self._generation, every = group.from_first((uuid.uuid4().hex, self.cadence.every))
        self.cadence = SnapshotCadence(every)
        keeper = replication.assign_peers(group.gather(self.host))
        self._exchange = _Exchange(group.new_channel(), group.rank, group.world, keeper)

    def save(self, state: TrainState, step: int) -> None:
        """Copies the state and starts to send the copy to the peer in the background. First waits for the previous
        exchange.
        """
        began_s = time.perf_counter()
        self._task.wait()
        self._current = 1 - self._current
        slot = self._slots[self._current]
        if slot.is_in_use:
            slot = self._slots[self._current] = _Slot()
        slot.has_own = slot.has_peer = False
        slot.snapshot, slot.own_rank = SnapshotId(step, self._generation, self._digests), self._current_group.rank
        slot.own.copy_from(state.shards())
        exchange = self._exchange
        assert exchange is not None
        self._task.start(lambda: exchange.run(slot))
        self._stall_s = time.perf_counter() - began_s

    def before_update(self) -> None:
        """Makes weight updates wait for a copy that may still read the weights on the GPU. Call it before weights
        change.
        """
        self._slots[self._current].own.before_update()

    def is_due(self, spec: TrainSpec, step: int, last: int) -> bool:
        """Returns whether to take a snapshot after `step`. `last` is the step of the last snapshot."""
        if self._current_group.world == 1:
            return False
        if spec.snapshot_every == "auto":
            return self.cadence.is_due(step, last) and spec.are_replicas_equal(step)
        return spec.is_due(spec.snapshot_every, step)

    def figures(self, step_s: float) -> list[float]:
        """Returns three measurements of this rank's last step: its duration in seconds, the seconds that it waited, and
        1.0 if an exchange ran at the same time, else 0.0.

        Call it when the next step begins. Pass the sums over all ranks to `record`.
        """
        was_beside, self._is_beside = self._is_beside, self._task.is_running
        return [step_s, self._stall_s, float(was_beside)]

    def record(self, sums: Sequence[float]) -> None:
        """Records the measurements of a step. `sums` are the results of `figures`, summed over the ranks."""
        step_s, stall_s, beside = sums
        self._stall_s = 0.0
        if step_s:
            self.cadence.record(step_s / self._current_group.world, stall_s / self._current_group.world, beside > 0)

    def wait(self) -> None:
        """Waits until the last snapshot is complete on all ranks."""
        self._task.wait()

    def close(self) -> None:
        """Leaves the generation, even if its ranks can no longer communicate. Returns quickly and does not
        communicate.
        """
        self._group = self._exchange = None
        try:
            ended = self._task.wait(CLOSE_S)
        except Exception:  # broken by a dead peer; what has arrived counts
            ended = True
        if not ended:  # it waits for a peer and may use its buffers until that peer is gone
            old = self._slots[self._current]
            self._slots[self._current] = _Slot(
                old.snapshot, old.elements, old.own, old.own_rank, old.has_own, is_in_use=True
            )
            self._task = BackgroundTask("snapshot")

    def find_newest(self) -> int:
        """Returns the step of the newest snapshot that is complete in the memory of all ranks together. Returns 0 if
        there is none. Raises CheckpointError if the snapshot was taken with another model or dataset.
        """
        self._copies = [copy for part in self._current_group.gather(self._own_copies()) for copy in part]
        self._selected = replication.latest_complete(self._copies)
        if self._selected is not None and (changed := set(self._digests) - set(self._selected.digests)):
            raise CheckpointError(
                f"the {min(changed)[0]} has changed since step {self._selected.step}, while the run continued.",
                hint="Restore it, or choose another out directory.",
            )
        return self._selected.step if self._selected else 0

    def load(self, state: TrainState) -> None:
        """Loads the snapshot that `find_newest` found, from the memory of all ranks. The current layout may differ from
        the snapshot's layout.
        """
        assert self._selected is not None
        copies = [copy for copy in self._copies if copy.snapshot == self._selected]
        state.load(SnapshotReader(self._current_group, copies, self._buffers(self._selected)).fill)

    @property
    def _current_group(self) -> ProcessGroup:
        assert self._group is not None, "join a generation first"
        return self._group

    def _own_copies(self) -> list[SnapshotCopy]:
        found = []
        for slot in self._slots:
            if slot.snapshot is None:
                continue
            for rank, image, has in (
                (slot.own_rank, slot.own, slot.has_own),
                (slot.peer_rank, slot.peer, slot.has_peer),
            ):
                if has:
                    found.append(
                        SnapshotCopy(slot.snapshot, self._current_group.rank, rank, tuple(image.entries), slot.elements)
                    )
        return found

    def _buffers(self, snapshot: SnapshotId) -> dict[int, StagingBuffer]:
        """Returns the copies of a snapshot that this rank holds, by the rank whose state they are."""
        found: dict[int, StagingBuffer] = {}
        for slot in self._slots:
            if slot.snapshot == snapshot:
                found |= {slot.own_rank: slot.own} if slot.has_own else {}
                found |= {slot.peer_rank: slot.peer} if slot.has_peer else {}
        return found
