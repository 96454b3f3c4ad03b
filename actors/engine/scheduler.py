"""Decides, before each step, which tokens of which sequences are computed; and after it, what that means.

One rule covers prefill, chunked prefill, decode, prefix hits and resumption: a sequence has `tokens`, of which
`num_computed` have their KV, and each step brings some sequences closer to being up to date (as in vLLM v1). Pure
Python, no clock, no randomness, no torch: the same calls give the same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from raytide.actors.engine.blocks import BlockPool, chain_hash
from raytide.actors.engine.core import FinishReason
from raytide.actors.engine.sequence import Chunk, Sequence, StepPlan
from raytide.core.errors import UsageError

__all__ = ["Scheduler"]


class Scheduler:
    """First come, first served. When blocks run out, the latest arrival loses its own and is computed again later.

    Progress: the oldest running sequence can take every other one's blocks, and a sequence that could not fit into
    the whole pool is refused by `add`; so each step advances the oldest, and every sequence becomes the oldest.
    """

    def __init__(self, pool: BlockPool, *, max_running: int, max_batch_tokens: int, prefix_cache: bool = True) -> None:
        assert max_batch_tokens >= max_running, "the budget must hold one token of every running sequence"
        self.pool = pool
        self.running: list[Sequence] = []  # by arrival
        self.waiting: deque[Sequence] = deque()  # by arrival: preempted ones come before newcomers
        self.preemptions = 0
        self._max_running = max_running
        self._budget = max_batch_tokens
        self._prefix_cache = prefix_cache
        self._arrivals = 0
        self._dropped: list[Sequence] = []  # lost their blocks outside a step

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, or raise UsageError if it could never run to its `max_len`."""
        self._number(seq)
        self.waiting.append(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Queue another sample of the parent's prompt, to share its KV."""
        assert parent.tokens[: parent.prompt_len] == child.tokens
        self.add(child)

    def adopt(self, seq: Sequence, num_computed: int) -> bool:
        """Run a sequence whose KV for the first `num_computed` tokens comes from elsewhere: the caller writes it to
        `seq.block_ids` before the next step. False, and nothing done, when there is no room now.
        """
        assert 0 <= num_computed < len(seq.tokens)
        if len(self.running) >= self._max_running or not self._reserve(seq, len(seq.tokens)):
            return False
        self._number(seq)
        seq.num_computed = num_computed
        self.running.append(seq)
        return True

    def invalidate(self) -> None:
        """The weights have changed: nothing that was computed counts any more."""
        self._dropped = list(self.running)
        for seq in reversed(self._dropped):
            self._preempt(seq)
        for seq in self.waiting:
            seq.block_hashes = []
        self.pool.forget()

    def _number(self, seq: Sequence) -> None:
        if not seq.tokens:
            raise UsageError(f"request {seq.seq_id}: the prompt is empty.", hint="Send at least one token.")
        if self.pool.blocks_for(seq.max_len) > self.pool.num_blocks:
            raise UsageError(
                f"request {seq.seq_id} needs KV for {seq.max_len} tokens; the engine holds "
                f"{self.pool.num_blocks * self.pool.block_size}.",
                hint="Shorten the prompt, lower max_tokens, or give the engine more kv_memory_gb.",
            )
        seq.arrival = self._arrivals
        self._arrivals += 1

    def plan(self, now_s: float = 0.0) -> StepPlan:
        """The next step. Blocks for its tokens are allocated; nothing counts as computed before `commit`."""
        plan, chosen, left = StepPlan(), dict[str, Chunk](), self._budget
        # Decodes first: a long prefill never delays them, it gets what they leave (at least one token, by the budget).
        decodes = [seq for seq in self.running if seq.num_pending == 1]
        prefills = [seq for seq in self.running if seq.num_pending > 1]
        for seq in decodes + prefills:
            length = min(seq.num_pending, left)
            if length == 0 or seq in plan.preempted:
                continue
            while not self._reserve(seq, seq.num_computed + length):
                victim = self.running[-1]
                self._preempt(victim)
                plan.preempted.append(victim)
                dropped = chosen.pop(victim.seq_id, None)
                left += dropped.length if dropped else 0
                if victim is seq:
                    break
            else:
                chosen[seq.seq_id] = Chunk(seq, seq.num_computed, length)
                left -= length
        if not plan.preempted:
            self._admit(chosen, left)
        plan.preempted += self._dropped
        self._dropped = []
        plan.chunks = list(chosen.values())
        return plan

    def commit(self, plan: StepPlan, sampled: Mapping[str, int]) -> None:
        """Take the step's result: KV of every chunk is written, and `sampled` has the next token of those that are up
        to date.

        Sequences that finished since `plan` are skipped. Those whose token ends them are finished here.
        """
        for chunk in plan.chunks:
            seq = chunk.seq
            if seq.finish_reason is not None:
                continue
            seq.num_computed = chunk.start + chunk.length
            self._register(seq, chunk.start)
            token = sampled.get(seq.seq_id)
            if token is None:
                continue
            seq.tokens.append(token)
            if token in seq.stop_token_ids:
                self.finish(seq, "stop")
            elif len(seq.tokens) >= seq.max_len:
                self.finish(seq, "length")

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence, wherever it is, and free its blocks. Ending it twice changes only the reason."""
        if seq.finish_reason is None:
            (self.running if seq in self.running else self.waiting).remove(seq)
            self._release(seq)
        seq.finish_reason = reason

    def _admit(self, chosen: dict[str, Chunk], left: int) -> None:
        """Start waiting sequences, in order, while a whole prompt and one more token fit beside what runs."""
        while self.waiting and left and len(self.running) < self._max_running:
            seq = self.waiting[0]
            hit = self._cached_prefix(seq)
            fresh = self.pool.blocks_for(len(seq.tokens) + 1) - len(hit)
            if fresh + self.pool.num_unreferenced(hit) > self.pool.num_free:
                return
            self.waiting.popleft()
            self.running.append(seq)
            self.pool.share(hit)
            seq.block_ids = hit
            seq.num_computed = len(hit) * self.pool.block_size
            if not seq.preemptions:
                seq.num_cached = seq.num_computed
            self._reserve(seq, len(seq.tokens))
            length = min(seq.num_pending, left)
            chosen[seq.seq_id] = Chunk(seq, seq.num_computed, length)
            left -= length

    def _reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for its first `num_tokens`; False, and nothing done, when the pool lacks them."""
        missing = self.pool.blocks_for(num_tokens) - len(seq.block_ids)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            seq.block_ids += self.pool.allocate(missing)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; they stay cached, so that a quick resume is a prefix hit."""
        self.running.remove(seq)
        self._release(seq)
        seq.num_computed = 0
        seq.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        self.pool.free(seq.block_ids)
        seq.block_ids = []

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that already hold the start of a sequence. Its last token is computed in any case, for the logits."""
        if not self._prefix_cache or not seq.reads_cache:
            return []
        count = (len(seq.tokens) - 1) // self.pool.block_size
        return self.pool.match(self._hashes(seq, count)[:count])

    def _register(self, seq: Sequence, start: int) -> None:
        """Offer the blocks that a step from `start` has filled to later sequences."""
        first, end = start // self.pool.block_size, seq.num_computed // self.pool.block_size
        if self._prefix_cache and end > first:
            hashes = self._hashes(seq, end)
            for index in range(first, end):
                self.pool.register(seq.block_ids[index], hashes[index])

    def _hashes(self, seq: Sequence, count: int) -> list[bytes]:
        """At least the first `count` block hashes of a sequence, computed once."""
        size, hashes = self.pool.block_size, seq.block_hashes
        while len(hashes) < count:
            at = len(hashes) * size
            hashes.append(chain_hash(hashes[-1] if hashes else seq.salt, seq.tokens[at : at + size]))
        return hashes
