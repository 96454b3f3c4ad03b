"""Snapshots in memory: every rank keeps a copy of its own state and of a buddy's on another host, step after step.

When members are lost, the survivors load the newest snapshot that they still hold whole, in whatever layout the new
gang has, without touching storage. The object outlives the generations: it joins each, and closes when that is over.
"""

from __future__ import annotations

import uuid
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

CLOSE_S = 2.0


@dataclass(slots=True)
class _Slot:
    """One snapshot as this process has it."""

    snapshot: SnapshotId | None = None
    elements: int = 0
    own: StagingBuffer = field(default_factory=StagingBuffer)
    own_rank: int = 0
    has_own: bool = False
    peer: StagingBuffer = field(default_factory=StagingBuffer)
    """The image of the rank whose buddy this one is."""
    peer_rank: int = 0
    has_peer: bool = False
    is_in_use: bool = False
    """A thread of a broken generation may still read the own image."""


@dataclass(slots=True)
class _Exchange:
    """What a thread needs that may outlive its generation: no group but its own, since one that is held stays open."""

    channel: dist.ProcessGroup
    rank: int
    world: int
    peers: list[int]
    layouts: list[list[BufferEntry]] = field(default_factory=list)
    """What each rank's image holds; the same for as long as the layout."""
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
        dist.all_reduce(torch.zeros(1), group=self.channel)  # from here on nobody needs the snapshot before


class Snapshots:
    """All ranks call every method but `close` together. Costs four times a rank's share of the state in host memory:
    two snapshots, since the older one is needed until the newer is whole everywhere."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._slots = [_Slot(), _Slot()]
        self._current = 0
        self._task = BackgroundTask("snapshot")
        self._group: ProcessGroup | None = None
        self._exchange: _Exchange | None = None
        self._generation = ""
        self._copies: list[SnapshotCopy] = []
        self._selected: SnapshotId | None = None

    def join(self, group: ProcessGroup) -> None:
        """Belong to this generation's group from now on."""
        self._group = group
        self._generation = group.from_first(uuid.uuid4().hex)
        keeper = replication.assign_peers(group.gather(self.host))
        self._exchange = _Exchange(group.new_channel(), group.rank, group.world, keeper)

    def save(self, state: TrainState, step: int) -> None:
        """Copy the state now, and give the copy to the buddy beside the training. Waits for the exchange before."""
        self._task.wait()
        self._current = 1 - self._current
        slot = self._slots[self._current]
        if slot.is_in_use:
            slot = self._slots[self._current] = _Slot()
        slot.has_own = slot.has_peer = False
        slot.snapshot, slot.own_rank = SnapshotId(step, self._generation), self._current_group.rank
        slot.own.copy_from(state.shards())
        exchange = self._exchange
        assert exchange is not None
        self._task.start(lambda: exchange.run(slot))

    def before_update(self) -> None:
        """Call before weights change: a copy may still be under way on the GPU."""
        self._slots[self._current].own.before_update()

    def wait(self) -> None:
        """Until the last snapshot is whole on all ranks."""
        self._task.wait()

    def close(self) -> None:
        """Leave the generation, healthy or not. For this rank alone, and quick."""
        self._group = self._exchange = None
        try:
            ended = self._task.wait(CLOSE_S)
        except Exception:  # a dead peer broke it; what has arrived by then counts
            ended = True
        if not ended:  # it waits for a peer, and may read and write its images until that one is gone too
            old = self._slots[self._current]
            self._slots[self._current] = _Slot(
                old.snapshot, old.elements, old.own, old.own_rank, old.has_own, is_in_use=True
            )
            self._task = BackgroundTask("snapshot")

    def find_newest(self) -> int:
        """The step of the newest snapshot that the ranks hold whole between them; 0 when there is none."""
        self._copies = [holding for part in self._current_group.gather(self._own_copies()) for holding in part]
        self._selected = replication.latest_complete(self._copies)
        return self._selected.step if self._selected else 0

    def load(self, state: TrainState) -> None:
        """Load what `newest` found, from all ranks' memory into this layout."""
        assert self._selected is not None
        offered = [holding for holding in self._copies if holding.snapshot == self._selected]
        state.load(SnapshotReader(self._current_group, offered, self._buffers(self._selected)).fill)

    @property
    def _current_group(self) -> ProcessGroup:
        assert self._group is not None, "a snapshot belongs to a generation"
        return self._group

    def _own_copies(self) -> list[SnapshotCopy]:
        held = []
        for slot in self._slots:
            if slot.snapshot is None:
                continue
            for rank, image, has in (
                (slot.own_rank, slot.own, slot.has_own),
                (slot.peer_rank, slot.peer, slot.has_peer),
            ):
                if has:
                    held.append(
                        SnapshotCopy(slot.snapshot, self._current_group.rank, rank, tuple(image.entries), slot.elements)
                    )
        return held

    def _buffers(self, snapshot: SnapshotId) -> dict[int, StagingBuffer]:
        """This rank's images of a snapshot, by the rank that they come from."""
        found: dict[int, StagingBuffer] = {}
        for slot in self._slots:
            if slot.snapshot == snapshot:
                found |= {slot.own_rank: slot.own} if slot.has_own else {}
                found |= {slot.peer_rank: slot.peer} if slot.has_peer else {}
        return found
