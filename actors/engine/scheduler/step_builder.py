"""Finds the KV that a starting sequence can reuse, and collects the chunks of a step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from raytide.actors.engine.kv_cache.block_pool import BlockPool, Place
from raytide.actors.engine.kv_cache.prefix_cache import PrefixCache
from raytide.actors.engine.sequence import ScheduledChunk, Sequence, StepPlan


@dataclass(slots=True)
class KvSource:
    """The KV of the first `num_tokens` tokens: whole blocks at `places`, the rest in the parent's `tail`."""

    num_tokens: int
    places: list[Place]
    hashes: Items[bytes | None]
    tail: int | None = None
    is_cache: bool = False

    @property
    def on_device(self) -> tuple[int, ...]:
        return tuple(block for on_host, block in self.places if not on_host)

    def load(self, seq: Sequence, pool: BlockPool) -> None:
        """Gives the KV to a sequence. The caller has added references to the places."""
        seq.block_ids = pool.load(self.places, self.hashes)
        if self.tail is not None:
            seq.block_ids.append(pool.copy(self.tail))
        pool.free_host(seq.host_ids)
        seq.host_ids = []


def find_source(seq: Sequence, pool: BlockPool, prefixes: PrefixCache) -> KvSource:
    """Returns a sequence's swapped out blocks, else those of its running parent, else the cached prefix."""
    if seq.host_ids:
        hashes = prefixes.computed(seq)
        return KvSource(seq.num_computed, pool.saved(seq.host_ids, hashes), hashes)
    parent, most = seq.parent, len(seq.tokens) - 1
    if parent is not None and parent.block_ids and parent.num_computed > most:
        whole, rest = divmod(most, pool.block_size)
        places = [(False, block) for block in parent.block_ids[:whole]]
        tail = parent.block_ids[whole] if rest else None
        return KvSource(most, places, [None] * whole, tail)
    places = prefixes.cached(seq)
    return KvSource(len(places) * pool.block_size, places, seq.block_hashes[: len(places)], is_cache=True)


class StepBuilder:
    """The chunks of a step. Each decode of `running` has a token of the budget reserved; `left` is for the rest.
    `logprob_rows` bounds the prompt positions whose log probabilities are computed.
    """

    def __init__(self, budget: int, running: Items[Sequence], dropped: list[Sequence], logprob_rows: int) -> None:
        self._logprob_rows = logprob_rows
        self.left = budget - sum(len(seq.tokens) - seq.num_computed == 1 for seq in running)
        self.evicted: set[str] = set()
        self._preempted = dropped
        self.decodes: list[ScheduledChunk] = []
        self._others: list[ScheduledChunk] = []

    def decode(self, seq: Sequence) -> None:
        self.decodes.append(ScheduledChunk(seq, seq.num_computed, 1))

    def fill(self, seq: Sequence) -> None:
        """Adds as much of a sequence as the budget allows, perhaps nothing. Positions whose logits are all wanted are
        bounded, since each takes the memory of the whole vocabulary.
        """
        length = min(seq.num_pending, self.left)
        if seq.params.prompt_logprobs is not None and seq.num_computed < seq.prompt_len:
            length = min(length, self._logprob_rows)
            self._logprob_rows -= length
            if length == 0:
                return
        self._others.append(ScheduledChunk(seq, seq.num_computed, length))
        self.left -= length

    def stall(self, seq: Sequence) -> None:
        """Leaves a running sequence out of this step."""
        self.left += seq.num_pending == 1

    def evict(self, seq: Sequence) -> None:
        self.stall(seq)
        self.evicted.add(seq.seq_id)
        self._preempted.append(seq)

    def plan(self) -> StepPlan:
        return StepPlan(self.decodes + self._others, self._preempted)
