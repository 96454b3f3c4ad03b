"""Finds the KV that a starting sequence can reuse, and collects the chunks of a step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from raytide.actors.engine.kv_cache.block_pool import BlockPool, Place
from raytide.actors.engine.kv_cache.prefix_cache import PrefixCache
from raytide.actors.engine.scheduler.policy import is_protected
from raytide.actors.engine.scheduler.team_share import StepLimit
from raytide.actors.engine.sequence import ScheduledChunk, Sequence, StepPlan


@dataclass(slots=True)
class KvSource:
    """The KV that a sequence can reuse for its first `num_tokens` tokens. `places` lists the reusable blocks, on the
    device or in host memory.

    The tokens that a sequence shares with its parent may end in the middle of a block. In this case `tail` is this
    block of the parent, and `places` does not list it. `load` makes a copy of `tail` for the sequence.
    """

    num_tokens: int
    places: list[Place]
    hashes: Items[bytes | None]
    tail: int | None = None
    is_cache: bool = False

    @property
    def on_device(self) -> tuple[int, ...]:
        return tuple(block for on_host, block in self.places if not on_host)

    def load(self, seq: Sequence, pool: BlockPool) -> None:
        """Puts the reusable KV into the first blocks of a sequence. The caller must first add references to the blocks
        in `places`.
        """
        seq.block_ids = pool.load(self.places, self.hashes)
        if self.tail is not None:
            seq.block_ids.append(pool.copy(self.tail))
        pool.free_host(seq.host_ids)
        seq.host_ids = []


def find_source(seq: Sequence, pool: BlockPool, prefixes: PrefixCache) -> KvSource:
    """Returns the KV that a sequence can start from: its own swapped-out blocks, or the blocks of its running parent,
    or its cached prefix. Of these, the first that exists is returned.
    """
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
    """Collects the chunks of a step. One token of the budget is reserved for each decoding sequence in `running`, and
    `left` is the remaining budget. At most `logprob_rows` prompt positions get log probabilities.
    """

    def __init__(self, budget: int, running: Items[Sequence], dropped: list[Sequence], logprob_rows: int) -> None:
        self._logprob_rows = logprob_rows
        self.left = budget - sum(len(seq.tokens) - seq.num_computed == 1 for seq in running)
        self.limit: StepLimit | None = None
        self.evicted: set[str] = set()
        self.stalled: set[str] = set()
        self._started: set[str] = set()
        self.held: list[Sequence] = []
        self._preempted = dropped
        self.decodes: list[ScheduledChunk] = []
        self.prompts: list[ScheduledChunk] = []

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.prompts)

    def room(self, seq: Sequence) -> int:
        """Returns the number of tokens that a sequence may take from `left`, the unreserved budget."""
        return self.left if self.limit is None else self.limit.tokens(seq, self.left)

    def decode(self, seq: Sequence) -> None:
        self.decodes.append(ScheduledChunk(seq, seq.num_computed, 1))

    @property
    def started(self) -> list[ScheduledChunk]:
        """The chunks of the sequences that start in this step."""
        return [chunk for chunk in self.prompts if chunk.seq.seq_id in self._started]

    def may_evict(self, seq: Sequence) -> bool:
        """Returns whether a running sequence may be evicted for a sequence of better rank. A sequence that starts in
        this step, or that is protected, may not be evicted.
        """
        return seq.seq_id not in self._started and not is_protected(seq)

    def start(self, seq: Sequence) -> None:
        """Starts a waiting sequence in this step, and adds as many of its tokens as the budget allows."""
        self._started.add(seq.seq_id)
        if self.limit is not None:
            self.limit.start(seq)
        self.fill(seq)

    def fill(self, seq: Sequence) -> None:
        """Adds as many tokens of a sequence as the budget allows. This number may be 0. Prompt positions that need log
        probabilities are also limited by `logprob_rows`, since the logits of each position cover the whole vocabulary.
        """
        length = min(seq.num_pending, self.room(seq))
        if seq.params.prompt_logprobs is not None and seq.num_computed < seq.prompt_len:
            length = min(length, self._logprob_rows)
            self._logprob_rows -= length
            if length == 0:
                return
        self.prompts.append(ScheduledChunk(seq, seq.num_computed, length))
        self.left -= length

    def stall(self, seq: Sequence) -> None:
        """Leaves a running sequence out of this step because it lacks a block."""
        self.left += seq.num_pending == 1
        self.stalled.add(seq.seq_id)

    def hold(self, seq: Sequence) -> None:
        """Leaves a running sequence out of this step. This keeps the step short for a light team (see TeamShare)."""
        self.left += seq.num_pending == 1
        self.held.append(seq)

    def release_held(self) -> list[Sequence]:
        """Removes the limit that keeps the step short. Returns the running sequences that were left out of this step
        because of the limit.
        """
        held = [seq for seq in self.held if seq.seq_id not in self.evicted]
        self.left -= sum(seq.num_pending == 1 for seq in held)
        self.held, self.limit = [], None
        return held

    def evict(self, seq: Sequence) -> None:
        self.left += seq.num_pending == 1
        self.evicted.add(seq.seq_id)
        self._preempted.append(seq)

    def plan(self) -> StepPlan:
        return StepPlan(self.decodes + self.prompts, self._preempted)
