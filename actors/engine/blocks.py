"""The pool of KV blocks: who holds each, which are free, and which still hold a prefix that can be used again.

A block is free when nobody references it; a free block that was registered under a hash keeps its content until it is
handed out again, least recently used first. Nothing here touches memory: a block is a number.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from raytide.core.errors import ConfigError

__all__ = ["BlockPool", "chain_hash"]


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """128 bits for a block's tokens and all tokens before them. `parent` of the first block may be a salt."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Reference counts and hashes in flat arrays; every operation is O(1) per block."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a pool of {num_blocks} KV blocks of {block_size} tokens holds nothing.",
                hint="Give the engine more kv_memory_gb.",
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self._refs = array("i", bytes(4 * num_blocks))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be reused first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; what they cached is forgotten. The caller has checked `num_free`."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._drop_hash(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference each. Cached ones wait at the far end of the free list, later blocks reused before
        earlier ones.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> None:
        """Remember what a full, written block holds. The first block registered under a hash stays the one to share."""
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest cached prefix of a chain. They are not referenced: `share` them to keep
        them.
        """
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference each."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def num_unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of these `share` would take off the free list."""
        return sum(self._refs[block] == 0 for block in blocks)

    def discard(self, blocks: Sequence[int]) -> list[int]:
        """Forget what the blocks hold that only the caller references, and name those: their content is not to be
        trusted.
        """
        alone = [block for block in blocks if self._refs[block] == 1]
        for block in alone:
            self._drop_hash(block)
        return alone

    def forget(self) -> None:
        """Forget what every block holds."""
        for block in list(self._block_of.values()):
            self._drop_hash(block)

    def _drop_hash(self, block: int) -> None:
        stale = self._hash_of[block]
        if stale is not None:
            del self._block_of[stale]
            self._hash_of[block] = None

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables of all living sequences. For tests."""
        held = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a sequence holds a block twice"
            for block in table:
                held[block] += 1
        assert held == self._refs.tolist(), "reference counts differ from the block tables"
        assert set(self._free) == {block for block, refs in enumerate(held) if refs == 0}, "free list is wrong"
        assert {h: b for b, h in enumerate(self._hash_of) if h is not None} == self._block_of, "hash index is wrong"
