"""The KV blocks of one memory (device or host): their reference counts, the free blocks, and the blocks that hold a
reusable prefix.

A block without references is free. A free block that was registered under a hash keeps its content until the block
is taken. Free blocks without a hash are taken first. Then the least recently used blocks are taken. This module does
not access the memory itself. A block is only a number here.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockAllocator:
    """Allocates the blocks of one memory, counts their references, and finds shared blocks by hash.

    Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = array("i", bytes(4 * num_blocks))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # An OrderedDict is a linked list in C; the same over two arrays takes twice as long.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be taken first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> tuple[int, bytes | None]:
        """Takes a free block and gives it one reference. Returns the block, and the hash of the cached content that is
        lost, if any. The caller must check `num_free` first.
        """
        block, _ = self._free.popitem(last=False)
        stale = self._hash_of[block]
        if stale is not None:
            self.forget(block)
        self.refs[block] = 1
        return block, stale

    def add_reference(self, block: int) -> None:
        if self.refs[block] == 0:
            del self._free[block]
        self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each block. Blocks with cached content go to the end of the free list, the last block
        of a prefix first. The last blocks of a prefix are therefore reused before its first blocks. The other order
        would be wasteful, because a cached block is useless without the blocks before it.
        """
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, block_hash: bytes | None) -> int | None:
        """Returns the block that is registered under a hash. The block may be in use or free. Returns None if no block
        is registered.
        """
        return None if block_hash is None else self._block_of.get(block_hash)

    def register(self, block: int, block_hash: bytes) -> None:
        """Registers the content of a full block under a hash, so that sequences can share the block. If the hash
        already belongs to another block, the other block stays registered and this block is not registered.
        """
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, block: int) -> bytes | None:
        """Stops sharing a block's content. Returns the hash under which the block was registered, or None if the block
        was not registered.
        """
        stale = self._hash_of[block]
        if stale is not None:
            del self._block_of[stale]
            self._hash_of[block] = None
        return stale

    def cached(self) -> list[tuple[int, bytes]]:
        """Returns the blocks of cached prefixes with their hashes. Blocks in use come first. Free blocks follow, and
        among them the most recently used block is first.
        """
        order = [*(block for block in self._block_of.values() if self.refs[block]), *reversed(self._free)]
        return [(block, found) for block in order if (found := self._hash_of[block]) is not None]

    def forget_all(self) -> None:
        for block in list(self._block_of.values()):
            self.forget(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError if the reference counts disagree with the block tables of all living sequences. For
        tests.
        """
        held = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a sequence holds a block twice"
            for block in table:
                held[block] += 1
        assert held == self.refs.tolist(), "reference counts differ from the block tables"
        assert set(self._free) == {block for block, refs in enumerate(held) if refs == 0}, "free list is wrong"
        assert {h: b for b, h in enumerate(self._hash_of) if h is not None} == self._block_of, "hash index is wrong"
