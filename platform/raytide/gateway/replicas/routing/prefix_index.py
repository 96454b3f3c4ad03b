"""An index of the blocks that a replica's prefix cache is assumed to contain. The gateway infers the content from the
requests that it sent to the replica.
"""

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
    """Returns the hash that starts the chain of a prompt's block keys.

    The hash covers the adapter and the cache salt. The KV cache depends on both, as it does on the tokens.
    """
    return blake2b(repr(parts).encode(errors="replace"), digest_size=KEY_BYTES).digest()


def prefix_keys(tokens: Sequence[int], root: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """Returns a key for each of the first `MAX_BLOCKS` full blocks of a prompt. The key of a block covers the tokens
    from the start of the prompt to the end of the block.

    `known` contains the keys of the first blocks if these keys were computed before. If one of the numbers in the other
    blocks cannot be a token id, only `known` is returned.
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
    """Returns the keys of a prefix as one byte string. Replicas pass this string on to the other gateways."""
    return b"".join(keys)


def split_keys(prefix: bytes) -> list[bytes]:
    return [prefix[at : at + KEY_BYTES] for at in range(0, len(prefix), KEY_BYTES)]


class PrefixIndex:
    """The blocks that one replica is assumed to have cached, in order of last use.

    Using a block also uses all blocks before it in the prompt, as in the engine's own cache. A block is therefore never
    evicted before the blocks that follow it, and the cached blocks of a prompt always form a prefix. Times are counts
    of `clock`, which the indexes of several replicas share.
    """

    def __init__(self, capacity_blocks: int, clock: Iterator[int]) -> None:
        self._clock = clock
        self._capacity = min(capacity_blocks, MAX_INDEXED_BLOCKS)
        self._last_uses: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last_uses)

    def match(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a prompt are cached."""
        return bisect_left(keys, True, key=lambda key: key not in self._last_uses)

    def last_uses(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the time of last use of each of these blocks. All of them must be cached."""
        return [self._last_uses[key] for key in keys]

    def oldest_use(self) -> int | None:
        """Returns the time at which the block that will be evicted next was last used. Times are ticks of the index's
        `clock`. Returns None while the index has free capacity.
        """
        return next(iter(self._last_uses.values())) if 0 < self._capacity <= len(self._last_uses) else None

    def use(self, keys: Sequence[bytes]) -> int:
        """Records the blocks of a prompt as cached and as used now. Returns the time of this use."""
        now = next(self._clock)
        for key in reversed(keys):
            self._last_uses[key] = now
            self._last_uses.move_to_end(key)
        while len(self._last_uses) > self._capacity:
            self._last_uses.popitem(last=False)
        return now

    def undo(self, keys: Sequence[bytes], use: int) -> None:
        """Drops the blocks in `keys` whose last use was at the time `use`. Blocks that were used later stay."""
        for key in keys:
            if self._last_uses.get(key) == use:
                del self._last_uses[key]

    def evict_until(self, use: int) -> None:
        """Drops all blocks that were last used at the time `use` or earlier.

        It is called when the replica's cache turns out to lack a block that was last used at `use`.
        """
        while self._last_uses and next(iter(self._last_uses.values())) <= use:
            self._last_uses.popitem(last=False)
