"""The assumed content of a replica's prefix cache, from the requests that this gateway sent there."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

BLOCK_TOKENS = 16
KEY_BYTES = 8
MAX_BLOCKS = 2048
"""The most blocks of a prompt that are hashed: 32,768 tokens, which takes 2 ms. Later blocks are assumed to be cached
where these are.
"""
MAX_INDEXED_BLOCKS = 1 << 17
"""The most blocks in the index of one replica, which take about 20 MB."""
_WIDTH = array("i").itemsize * BLOCK_TOKENS


def root_key(*parts: str | None) -> bytes:
    """Returns the key from which the keys of a prompt's blocks start.

    It covers the adapter and the salt, because the KV cache depends on them as well as on the tokens.
    """
    return blake2b(repr(parts).encode(errors="replace"), digest_size=KEY_BYTES).digest()


def prefix_keys(tokens: Sequence[int], root: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """Returns a key for each full block of a prompt. A key covers the block's tokens and all tokens before them.

    `known` has the keys of the first blocks, if they were computed before. Blocks with numbers that cannot be tokens
    have no keys.
    """
    count, keys = min(len(tokens) // BLOCK_TOKENS, MAX_BLOCKS), list(known)
    try:
        data = array("i", tokens[len(keys) * BLOCK_TOKENS : count * BLOCK_TOKENS]).tobytes()
    except (OverflowError, TypeError):
        return keys
    key = keys[-1] if keys else root
    for at in range(0, len(data), _WIDTH):
        key = blake2b(key + data[at : at + _WIDTH], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Returns the keys of a prefix in the form in which replicas pass them to other gateways."""
    return b"".join(keys)


def split_keys(prefix: bytes) -> list[bytes]:
    return [prefix[at : at + KEY_BYTES] for at in range(0, len(prefix), KEY_BYTES)]


class PrefixIndex:
    """The cached blocks of one replica, the least recently used first.

    As in the engine's own cache, a block is always used at least as recently as the blocks that continue it; so the
    cached blocks of a prompt always form a prefix. Times are numbers from `clock`, which several indexes share.
    """

    def __init__(self, capacity_blocks: int, clock: Iterator[int]) -> None:
        self._clock = clock
        self._capacity = min(capacity_blocks, MAX_INDEXED_BLOCKS)
        self._last_uses: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last_uses)

    def match(self, keys: Sequence[bytes]) -> int:
        """Returns how many of a prompt's first blocks are cached."""
        return bisect_left(keys, True, key=lambda key: key not in self._last_uses)

    def last_uses(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the times of the last use of these cached blocks."""
        return [self._last_uses[key] for key in keys]

    def oldest_use(self) -> int | None:
        """Returns the time of last use of the block that will be evicted next; None while the index has free
        capacity."""
        return next(iter(self._last_uses.values())) if 0 < self._capacity <= len(self._last_uses) else None

    def use(self, keys: Sequence[bytes]) -> int:
        """Records a prompt's blocks as cached and used now; returns the time of this use."""
        now = next(self._clock)
        for key in reversed(keys):
            self._last_uses[key] = now
            self._last_uses.move_to_end(key)
        while len(self._last_uses) > self._capacity:
            self._last_uses.popitem(last=False)
        return now

    def undo(self, keys: Sequence[bytes], use: int) -> None:
        """Drops the blocks that were last used at the time `use`; blocks that were used again later stay."""
        for key in keys:
            if self._last_uses.get(key) == use:
                del self._last_uses[key]

    def evict_until(self, use: int) -> None:
        """Drops all blocks that were last used at `use` or earlier, because a block of that time was found missing in
        the replica's cache.
        """
        while self._last_uses and next(iter(self._last_uses.values())) <= use:
            self._last_uses.popitem(last=False)
