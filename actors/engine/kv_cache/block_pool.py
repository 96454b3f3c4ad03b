"""The pool of KV blocks on the device and in host memory, and the moves between the two at the start of a step.

Host memory holds the blocks of evicted sequences, and cached prefixes whose device blocks were needed for something
else. All moves of a step happen before the step computes: first from device to host, then from host to device, then
copies on the device. Blocks that a pending move will read are therefore held until `take_moves`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from raytide.actors.engine.kv_cache.block_allocator import BlockAllocator
from raytide.actors.engine.sequence import StepPlan
from raytide.core.errors import ConfigError

if TYPE_CHECKING:
    from raytide.actors.engine.kv_cache.disk_tier import DiskTier
    from raytide.actors.engine.kv_cache.handle import Bytes

Place = tuple[bool, int]
"""A block's location: True if it is in host memory, and its number there or on the device."""


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns a 128-bit hash that covers a block's tokens and all tokens before them. `parent` is the hash of the
    previous block. For the first block, `parent` is the sequence's salt.
    """
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Allocates the KV blocks of device and host memory, and shares the blocks of cached prefixes.

    When a device block is needed for other content, its cached content may be saved. If `keeps_cold` is True and a
    host block is free, the content is moved to that host block. If there is a disk tier, the content may also be
    written to `disk`.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int = 0, disk: DiskTier | None = None
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a pool of {num_blocks} KV blocks of {block_size} tokens holds nothing.",
                hint="Give the engine more kv_memory_gb.",
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device, self.host = BlockAllocator(num_blocks), BlockAllocator(num_host_blocks)
        self.keeps_cold, self.disk = num_host_blocks > 0, disk
        self._moves = StepPlan()
        self._pending_device_reads: list[int] = []  # held until the moves are done
        self._pending_host_reads: list[int] = []

    @property
    def num_free(self) -> int:
        return self.device.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` device blocks with one reference each. The caller must check `num_free` first."""
        blocks = []
        for _ in range(count):
            block, cold = self.device.take()
            if cold is not None and self.keeps_cold and self.host.num_free and self.host.find(cold) is None:
                kept, _ = self.host.take()
                self.host.register(kept, cold)
                self._moves.swap_out.append((block, kept))
                self._pending_host_reads.append(kept)  # written once in a step, so not taken again in it
            if cold is not None and self.disk is not None and self.disk.wants(cold):
                self._moves.disk_out.append((block, cold))
            blocks.append(block)
        return blocks

    def allocate_now(self, count: int) -> list[int]:
        """Returns `count` device blocks that the caller may write immediately, before the next step's moves. Content
        that was cached in these blocks is lost, because a move could not save it in time.
        """
        return [self.device.take()[0] for _ in range(count)]

    def free(self, blocks: Sequence[int]) -> None:
        self.device.release(blocks)

    def free_host(self, blocks: Sequence[int]) -> None:
        self.host.release(blocks)

    def register(self, block: int, block_hash: bytes) -> None:
        """Lets later sequences share a full, written block."""
        self.device.register(block, block_hash)

    def match(self, hashes: Sequence[bytes]) -> list[Place]:
        """Returns the places of the blocks that form the longest cached prefix. A place is a pair: True if the block is
        in host memory, and the block's number. `hashes` are the chained hashes of the wanted blocks. Adds no references
        (see `add_reference`).
        """
        places: list[Place] = []
        for block_hash in hashes:
            place = self._find(block_hash)
            if place is None:
                break
            places.append(place)
        return places

    def saved(self, host_blocks: Sequence[int], hashes: Sequence[bytes | None]) -> list[Place]:
        """Returns where the blocks of an evicted sequence are: on the device if they are still there, else in host
        memory.
        """
        places: list[Place] = []
        for kept, block_hash in zip(host_blocks, hashes, strict=True):
            block = self.device.find(block_hash)
            places.append((True, kept) if block is None else (False, block))
        return places

    def num_taken(self, places: Sequence[Place]) -> int:
        """Returns the number of free device blocks that a sequence uses up if it reuses these cached blocks. A block in
        host memory uses up one free block, for its copy on the device. A device block without references is itself one
        of the free blocks, so it counts as well.
        """
        refs = self.device.refs
        return sum(on_host or refs[block] == 0 for on_host, block in places)

    def add_reference(self, places: Sequence[Place]) -> None:
        """Adds one reference to each of these blocks. The blocks may be on the device or in host memory."""
        for on_host, block in places:
            (self.host if on_host else self.device).add_reference(block)

    def load(self, places: Sequence[Place], hashes: Sequence[bytes | None]) -> list[int]:
        """Returns device blocks with the content of the cached blocks at `places`. The caller must already have
        references to these cached blocks. Those in host memory are copied into new device blocks.
        """
        blocks = []
        for (on_host, block), block_hash in zip(places, hashes, strict=True):
            if on_host:
                self._pending_host_reads.append(block)
                kept, (block,) = block, self.allocate(1)
                self._moves.swap_in.append((kept, block))
                if block_hash is not None:
                    self.device.register(block, block_hash)
            blocks.append(block)
        return blocks

    def bring_in(self, blocks: Sequence[tuple[bytes, Bytes]], most: int) -> int:
        """Lets the sequences of the next plan share blocks that were read from disk. Uses at most `most` free device
        blocks. Returns how many blocks are copied to the device, not counting those that are already there.
        """
        brought = 0
        for block_hash, content in blocks:
            block = self.device.find(block_hash)
            taken = block is None or self.device.refs[block] == 0
            if taken and most < 1:
                break
            most -= taken
            if block is None:
                (block,) = self.allocate(1)
                self.device.register(block, block_hash)
                self._moves.disk_in.append((content, block))
                brought += 1
            else:
                self.device.add_reference(block)
            self._pending_device_reads.append(block)
        return brought

    def can_save(self, hashes: Sequence[bytes | None]) -> bool:
        """Returns whether host memory has room for blocks with these hashes. The hash is None for a block that is not
        full or may not be shared.
        """
        found = [self.host.find(block_hash) for block_hash in hashes]
        refs = self.host.refs
        return sum(block is None or refs[block] == 0 for block in found) <= self.host.num_free

    def save(self, blocks: Sequence[int], hashes: Sequence[bytes | None]) -> list[int]:
        """Returns one host block for each of these device blocks. After the next moves, the host blocks have the
        content of the device blocks. The caller must check `can_save` first.
        """
        found = [self.host.find(block_hash) for block_hash in hashes]
        for kept in found:
            if kept is not None:
                self.host.add_reference(kept)
        saved = []
        for block, block_hash, kept in zip(blocks, hashes, found, strict=True):
            if kept is None:
                kept, _ = self.host.take()
                self._moves.swap_out.append((block, kept))
                if block_hash is not None:
                    self.host.register(kept, block_hash)
            saved.append(kept)
        return saved

    def copy(self, block: int) -> int:
        """Returns a new block into which the next moves will copy `block`. Only the caller has a reference to the new
        block.
        """
        self.device.add_reference(block)
        self._pending_device_reads.append(block)
        (own,) = self.allocate(1)
        self._moves.copies.append((block, own))
        return own

    def take_moves(self, plan: StepPlan) -> None:
        """Transfers the pending moves to the plan. The caller performs them before it uses the pool again."""
        moves = self._moves
        plan.disk_out, plan.disk_in = moves.disk_out, moves.disk_in
        plan.swap_out, plan.swap_in, plan.copies = moves.swap_out, moves.swap_in, moves.copies
        self._moves = StepPlan()
        self._release_reads()

    def discard(self, blocks: Sequence[int]) -> list[int]:
        """Stops sharing the given blocks, because their content cannot be trusted. A block with more than one reference
        is left alone. Returns the blocks that it stopped sharing.
        """
        alone = [block for block in blocks if self.device.refs[block] == 1]
        for block in alone:
            block_hash = self.device.forget(block)
            kept = self.host.find(block_hash)
            if kept is not None:
                self.host.forget(kept)
            if block_hash is not None and self.disk is not None:
                self.disk.forget(block_hash)
        return alone

    def reset(self) -> None:
        """Forgets the content of all blocks on the device and in host memory, and drops pending moves."""
        self.device.forget_all()
        self.host.forget_all()
        self._moves = StepPlan()
        self._release_reads()

    def check(self, tables: Sequence[Sequence[int]], host_tables: Sequence[Sequence[int]] = ()) -> None:
        """Raises AssertionError if the pool disagrees with the block tables of all living sequences. For tests."""
        self.device.check(tables)
        self.host.check(host_tables)

    def _find(self, block_hash: bytes) -> Place | None:
        block = self.device.find(block_hash)
        if block is not None:
            return False, block
        kept = self.host.find(block_hash)
        return None if kept is None else (True, kept)

    def _release_reads(self) -> None:
        self.device.release(self._pending_device_reads)
        self.host.release(self._pending_host_reads)
        self._pending_device_reads, self._pending_host_reads = [], []
