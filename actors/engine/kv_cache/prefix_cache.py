"""Finds the part of a sequence's prompt that is cached, and the part that other sequences are computing.

If another request is already computing a prefix, a new request may wait for that prefix instead of computing the prefix
a second time (as in SGLang).
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from raytide.actors.engine.kv_cache.block_pool import BlockPool, Place, chain_hash
from raytide.actors.engine.sequence import Rank, Sequence


class PrefixCache:
    """Finds cached prefixes. The hash of each full block depends on all blocks before it, and on the sequence's
    salt.
    """

    def __init__(self, pool: BlockPool, enabled: bool) -> None:
        self._pool = pool
        self._size = pool.block_size
        self._enabled = enabled
        self._producers: dict[bytes, Sequence] = {}  # the sequence that computes a block not cached yet

    def computed(self, seq: Sequence) -> list[bytes | None]:
        """Returns a hash for each block that holds computed tokens of a sequence. The hash is None if the block is not
        full or is not kept in the cache.
        """
        full, count = seq.num_computed // self._size, self._pool.blocks_for(seq.num_computed)
        hashes: list[bytes | None] = [*self._hashes(seq, full)] if self._keeps(seq) else []
        return hashes + [None] * (count - len(hashes))

    def cached(self, seq: Sequence) -> list[Place]:
        """Returns the cached blocks at the start of a sequence, on the device or in host memory. They never include the
        sequence's last token, which must be computed for the logits.
        """
        if not self._enabled or not seq.reads_cache:
            return []
        return self._pool.match(self._hashes(seq, self._shareable(seq)))

    def awaited(self, seq: Sequence, num_cached: int, order: Rank) -> bytes | None:
        """Returns the hash of the block for which the sequence should wait. Returns None if it should not wait.

        Running sequences may be computing blocks of the sequence's prefix. The sequence should wait for the last of
        these blocks if they make up at least half of its uncached tokens. A sequence never waits for a sequence of
        later rank.
        """
        if not self._producers or not seq.reads_cache:
            return None
        last, shared = None, 0
        for block_hash in self._hashes(seq, self._shareable(seq))[num_cached:]:
            maker = self._producers.get(block_hash)
            if maker is None or maker.rank[:2] > order[:2]:
                break
            last, shared = block_hash, shared + 1
        return last if 2 * shared * self._size >= len(seq.tokens) - num_cached * self._size else None

    def read_from_disk(self, seq: Sequence, num_cached: int) -> bytes | None:
        """Returns the key of a disk read that contains the blocks after the cached ones. Starts the read unless another
        sequence has started it. Returns None if the blocks are not on disk, or if computing them is cheaper.
        """
        disk = self._pool.disk
        if disk is None or not self._enabled or not seq.reads_cache:
            return None
        missing = self._hashes(seq, self._shareable(seq))[num_cached:]
        key = disk.on_its_way(missing[0]) if missing else None
        if key is None and missing and seq.asks_disk:
            key = disk.read(missing)
            seq.asks_disk = key is None
        return key

    def take_from_disk(self, running: Items[Sequence]) -> list[bytes]:
        """Lets sequences share the blocks that were read from disk. Keeps one free block for each running sequence that
        can still grow. Returns the keys of the reads that have ended.
        """
        disk, keys = self._pool.disk, list[bytes]()
        for read in () if disk is None else disk.finished():
            assert disk is not None
            growing = sum(len(seq.block_ids) * self._size < seq.max_len for seq in running)
            disk.note_hits(self._pool.bring_in(read.blocks, self._pool.num_free - growing))
            keys.append(read.key)
        return keys

    def cancel_reads(self) -> list[bytes]:
        """Abandons the disk reads that have not ended, and returns their keys."""
        return [] if self._pool.disk is None else self._pool.disk.cancel()

    def promise(self, seq: Sequence) -> None:
        """Records which full blocks a sequence will compute. Call it when the sequence starts to run."""
        if self._keeps(seq):
            for block_hash in self._hashes(seq, len(seq.tokens) // self._size)[seq.num_computed // self._size :]:
                self._producers.setdefault(block_hash, seq)

    def register(self, seq: Sequence) -> list[bytes]:
        """Lets later sequences share the blocks that a sequence has newly filled. Returns the hashes of these
        blocks.
        """
        first, end = seq.num_registered, seq.num_computed // self._size
        if not self._keeps(seq) or end <= first:
            return []
        hashes = self._hashes(seq, end)[first:]
        for block, block_hash in zip(seq.block_ids[first:end], hashes, strict=True):
            self._pool.register(block, block_hash)
            self._producers.pop(block_hash, None)
        seq.num_registered = end
        return hashes

    def withdraw(self, seq: Sequence) -> list[bytes]:
        """Removes the blocks that a sequence promised but did not compute. Call it when the sequence stops. Returns the
        hashes of these blocks.
        """
        broken = [each for each in seq.block_hashes[seq.num_registered :] if self._producers.get(each) is seq]
        for block_hash in broken:
            del self._producers[block_hash]
        return broken

    def _keeps(self, seq: Sequence) -> bool:
        """Returns whether a sequence's blocks are kept for later ones. Those of pooled prompts are not: nothing
        continues these prompts, and a corpus of them would displace the prefixes of chats.
        """
        return self._enabled and seq.pooled is None

    def _shareable(self, seq: Sequence) -> int:
        return (len(seq.tokens) - 1) // self._size

    def _hashes(self, seq: Sequence, count: int) -> list[bytes]:
        """Returns the first `count` block hashes of a sequence, each computed once."""
        size, hashes = self._size, seq.block_hashes
        while len(hashes) < count:
            at = len(hashes) * size
            parent = hashes[-1] if hashes else seq.salt
            for image in seq.images:  # their tokens are all the same
                if image.start < at + size and at < image.start + image.length:
                    parent += image.digest
            hashes.append(chain_hash(parent, seq.tokens[at : at + size]))
        return hashes[:count]
