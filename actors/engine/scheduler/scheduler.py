"""Plans each step and records the step's result. The plan says which tokens of which sequences the step computes.

One rule covers prefill, chunked prefill, decode, prefix hits and resumption (as in vLLM v1). A sequence has
`tokens`, of which the first `num_computed` have KV; each step computes KV of more tokens. The module is pure Python
and uses no clock, no randomness and no torch: the same calls give the same plans."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import Literal, Protocol

from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.kv_cache.prefix_cache import PrefixCache
from raytide.actors.engine.limits import MAX_PROMPT_LOGPROB_ROWS
from raytide.actors.engine.scheduler.policy import SchedulingPolicy, is_protected
from raytide.actors.engine.scheduler.preemption import SwapCost, choose_victims, preemption_cost
from raytide.actors.engine.scheduler.step_builder import KvSource, StepBuilder, find_source
from raytide.actors.engine.scheduler.team_share import TeamShare
from raytide.actors.engine.scheduler.waiting_queue import WaitingQueue
from raytide.actors.engine.sequence import ScheduledChunk, Sequence, StepPlan
from raytide.actors.engine.types import FinishReason
from raytide.core.errors import UsageError


class Drafter(Protocol):
    """Guesses the next tokens of sequences. The step that computes the guessed tokens also verifies the guesses."""

    def add_drafts(
        self, decodes: Items[ScheduledChunk], num_tokens: int, budget: int, reserve: Callable[[Sequence, int], int]
    ) -> None:
        """Adds drafts to the decodes of a step, at most `budget` tokens in all. `num_tokens` is the number of the
        step's tokens, not counting drafts. `reserve(seq, count)` returns how many of `count` drafts fit in the sequence
        `seq`."""


class Scheduler:
    """Plans each step: which sequences compute how many tokens, and which are preempted.

    The scheduler advances running sequences in the order of their ranks. When a sequence needs a block, it may evict
    sequences of later rank. A waiting sequence goes before running sequences of a higher level (see policy.py). It
    may evict a running sequence that has both a higher level and a lower priority.

    Every sequence ends at some time. Each step advances the sequence of first rank, because this sequence can take
    the blocks of all others. Every sequence has the first rank at some time. `add` refuses a sequence that exceeds
    the whole pool. Host memory is used only with a `swap_cost`.

    With a `team_slowdown`, sequences of light teams start first (see TeamShare). A step that computes sequences of
    light teams may leave out sequences of other teams. The other teams' sequences then take turns.
    `step_seconds(tokens)` returns the time of a step."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        max_batch_tokens: int,
        prefix_cache: bool = True,
        policy: Literal["fcfs", "priority", "deadline"] = "priority",
        ageing_s: float = 30.0,
        swap_cost: SwapCost | None = None,
        max_logprob_rows: int = MAX_PROMPT_LOGPROB_ROWS,
        drafter: Drafter | None = None,
        team_slowdown: float | None = None,
        step_seconds: Callable[[int], float] = float,
    ) -> None:
        assert max_batch_tokens >= max_running, "the budget must hold one token of every running sequence"
        self.pool = pool
        self.running: list[Sequence] = []  # by rank
        self.policy = SchedulingPolicy(policy, ageing_s)
        self.waiting = WaitingQueue(self.policy)
        self.preemptions = self._arrivals = 0
        self._max_running, self._drafter = max_running, drafter
        self._budget, self._logprob_rows = max_batch_tokens, max_logprob_rows
        self._prefixes = PrefixCache(pool, prefix_cache)
        self._swap_cost = swap_cost or SwapCost(math.inf)
        # A block that takes longer to move than to compute is not kept.
        pool.keeps_cold = pool.host.num_blocks > 0 and self._swap_cost.tokens_per_block < pool.block_size
        self._shares = None if team_slowdown is None else TeamShare(self.policy, team_slowdown, step_seconds)
        self._now_s = 0.0  # of the last plan
        self._dropped: list[Sequence] = []  # evicted outside of a step

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queues a sequence. Raises UsageError if the KV pool is too small for its `max_len`."""
        self._register(seq)
        self.waiting.push(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Queues `child`, another sample of the parent's prompt. The child starts once the prompt is computed. The
        child shares all blocks of the prompt except the last one, and gets a copy of the last one."""
        assert child.tokens == parent.tokens[: parent.prompt_len]
        self.add(child)
        child.parent = parent
        if parent.finish_reason is None and parent.num_computed < parent.prompt_len:
            self.waiting.park(child, parent.seq_id)

    def adopt(self, seq: Sequence, num_computed: int) -> bool:
        """Starts a sequence whose first `num_computed` tokens have KV from elsewhere. The caller writes this KV to
        `seq.block_ids` before the next step. If there is no room now, returns False and changes nothing."""
        assert 0 <= num_computed < len(seq.tokens)
        needed = self.pool.blocks_for(len(seq.tokens))
        if len(self.running) >= self._max_running or needed > self.pool.num_free:
            return False
        self._register(seq)
        seq.block_ids = self.pool.allocate_now(needed)
        seq.level = self.policy.priority(seq)
        self._start(seq, num_computed, num_registered=0)
        return True

    def invalidate(self) -> None:
        """Discards all KV, including cached prefixes. Puts the running sequences back into the queue, so that their KV
        is computed again.
        """
        for key in self._prefixes.cancel_reads():
            self.waiting.wake(key)
        for seq in self.running:
            self._withdraw_promises(seq)
            seq.waiting_since_s = self._now_s
            self.waiting.push(seq)
        self._dropped += self.running
        self.running = []
        for seq in self.waiting:
            self._release(seq)
            seq.block_hashes = []
        self.pool.reset()

    def plan(self, now_s: float = 0.0) -> StepPlan:
        """Returns the plan of the next step, with blocks allocated for its tokens. These tokens count as computed only
        after `commit`.
        """
        self._now_s = now_s
        for key in self._prefixes.take_from_disk(self.running):
            self.waiting.wake(key)
        # Decodes first: a long prefill never delays them, it gets what they leave.
        step = StepBuilder(self._budget, self.running, self._dropped, self._logprob_rows)
        self._dropped = []
        order = list(self.running)
        if self._shares is not None and self._shares.is_contested:
            self._start_light(order, step)
        self._fill(order, step)
        if self._shares is not None:
            self._shares.observe(step.limit, step.stalled, step.started)
        if step.is_empty and step.held:
            self._fill(step.release_held(), step)
        plan = step.plan()
        if self._drafter is not None and step.decodes and step.left > 0:
            limit = step.limit
            decodes = [each for each in step.decodes if limit is None or not limit.limits(each.seq)]
            self._drafter.add_drafts(decodes, plan.num_tokens, step.left, self._reserve)
        self.pool.take_moves(plan)
        return plan

    def _start_light(self, order: list[Sequence], step: StepBuilder) -> None:
        """Starts waiting sequences of light teams, before a prompt of another team can take the step's budget, and
        limits the tokens of the other teams in this step.
        """
        shares, now_s = self._shares, self._now_s
        assert shares is not None
        light = shares.light_teams(order, self.waiting.head(now_s))
        urgent = min((seq.rank[0] for seq in order if seq.num_pending > 1), default=math.inf)
        while light and (seq := self.waiting.head(now_s, light)) is not None:
            first = self.waiting.head(now_s)
            assert first is not None
            level = self.policy.level(seq, now_s)
            if level > min(urgent, self.policy.level(first, now_s)) or not self._admit(step, [], seq):
                break
        may_admit = len(self.running) < self._max_running and self.waiting.head(now_s) is not None
        step.limit = shares.limit(order, light, started=step.prompts, left=step.left, may_admit=may_admit)

    def _fill(self, order: list[Sequence], step: StepBuilder) -> None:
        """Adds the running sequences of `order` to a step, by rank, and starts waiting ones between them by level."""
        size = self.pool.block_size
        next_level = self._next_level(step)
        for at, seq in enumerate(order):
            while next_level < seq.rank[0]:
                next_level = self._next_level(step) if self._admit(step, order[at:]) else math.inf
            if seq.seq_id in step.evicted:
                continue
            if step.limit is not None and step.limit.tokens(seq, 1) == 0:
                step.hold(seq)
                continue
            start = seq.num_computed
            if len(seq.tokens) - start == 1 and start < len(seq.block_ids) * size:
                step.decode(seq)
                continue
            self._advance(seq, step)
            if step.evicted and next_level < math.inf:
                next_level = self._next_level(step)
        while next_level < math.inf:
            next_level = self._next_level(step) if self._admit(step, []) else math.inf

    def commit(self, plan: StepPlan, sampled: Mapping[str, Items[int]]) -> None:
        """Records the result of a step that has written the KV of every chunk. `sampled` maps the id of a sequence to
        its next tokens. It contains only sequences whose earlier tokens are all computed. A sequence gets one next
        token, or more if draft tokens were right. KV of wrong draft tokens does not count as computed. It is therefore
        never shared, and later steps overwrite it.

        Sequences that finished since `plan` are skipped. Sequences that end with their new token are finished here.
        """
        for chunk in plan.chunks:
            seq = chunk.seq
            if seq.finish_reason is not None:
                continue
            tokens = sampled.get(seq.seq_id, ())
            seq.tokens += tokens
            seq.num_computed = chunk.start + chunk.length - len(chunk.draft) + max(0, len(tokens) - 1)
            for block_hash in self._prefixes.register(seq):
                self.waiting.wake(block_hash)
            if chunk.start < seq.prompt_len <= seq.num_computed:
                self.waiting.wake(seq.seq_id)
            if seq.pooled is not None and seq.num_computed == seq.prompt_len:
                self.finish(seq, "stop")
            if not tokens:
                continue
            if tokens[-1] in seq.stop_token_ids:
                self.finish(seq, "stop")
            elif len(seq.tokens) >= seq.max_len:
                self.finish(seq, "length")

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in any state and frees its blocks. A second call changes only the reason."""
        if seq.finish_reason is None:
            if seq in self.waiting:
                self.waiting.remove(seq)
            else:
                self.running.remove(seq)
            self._withdraw_promises(seq)
            self._release(seq)
            if self._shares is not None:
                self._shares.leave(seq)
        seq.finish_reason = reason

    def _register(self, seq: Sequence) -> None:
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
        seq.waiting_since_s = seq.arrival_s
        if self._shares is not None:
            self._shares.enter(seq)

    def _next_level(self, step: StepBuilder) -> float:
        """Returns the level of the next waiting sequence; infinity if none can start in this step."""
        seq = self.waiting.head(self._now_s) if self.waiting else None
        if seq is None or seq.seq_id in step.evicted:
            return math.inf
        return self.policy.level(seq, self._now_s)

    def _advance(self, seq: Sequence, step: StepBuilder) -> None:
        """Plans a running sequence's next tokens. If no block is available, the sequence skips the step but keeps its
        blocks, which sequences of a better rank may take; one free block is reserved for it.
        """
        is_decode = seq.num_pending == 1
        length = 1 if is_decode else min(seq.num_pending, step.room(seq))
        if length == 0:
            return
        missing = self.pool.blocks_for(seq.num_computed + length) - len(seq.block_ids)
        if missing > self.pool.num_free:
            lower = [each for each in self.running if each.rank > seq.rank and step.may_evict(each)]
            victims = self._victims(lower, missing - self.pool.num_free, ())
            if not victims:
                step.stall(seq)
                return
            for victim in victims:
                self._evict(victim, step)
        seq.block_ids += self.pool.allocate(max(0, missing))
        if is_decode:
            step.decode(seq)
        else:
            step.fill(seq)

    def _reserve(self, seq: Sequence, count: int) -> int:
        """Returns how many of `count` draft tokens fit into a decoding sequence's blocks and maximum length. It
        allocates only blocks that no running sequence needs for its next token.
        """
        size = self.pool.block_size
        count = min(count, seq.max_len - len(seq.tokens) - 1)
        missing = self.pool.blocks_for(len(seq.tokens) + count) - len(seq.block_ids)
        if missing > 0:
            growing = sum(len(each.block_ids) * size < each.max_len for each in self.running)
            seq.block_ids += self.pool.allocate(max(0, min(missing, self.pool.num_free - growing)))
        return min(count, len(seq.block_ids) * size - len(seq.tokens))

    def _admit(self, step: StepBuilder, rest: list[Sequence], seq: Sequence | None = None) -> bool:
        """Starts or parks the next waiting sequence, or `seq`, and returns True. Returns False if it and all others
        have to wait. It may evict from `rest`, the running sequences that are not in the step yet.
        """
        seq = seq or self.waiting.head(self._now_s)
        assert seq is not None
        if step.limit is not None and not step.limit.admits(seq):
            return False
        level = self.policy.level(seq, self._now_s)
        lower = [each for each in rest if each.seq_id not in step.evicted and self.policy.may_evict(seq, level, each)]
        full = len(self.running) >= self._max_running
        gives_token = any(each.num_pending == 1 for each in lower)
        if (full and not lower) or (step.left == 0 and not gives_token):
            return False
        source = find_source(seq, self.pool, self._prefixes)
        awaited = self._prefixes.awaited(seq, len(source.places), (level, self.policy.due_s(seq), seq.arrival))
        if awaited is not None and source.is_cache:
            self.waiting.park(seq, awaited)
            return True
        missing = self._missing(seq, source, lower)
        victims = self._victims(lower, missing, source.on_device) if full or missing > 0 else []
        if (full or missing > 0) and not victims:
            return False
        if step.left + sum(victim.num_pending == 1 for victim in victims) == 0 or not self._may_run_to_its_end(seq):
            return False
        read = self._prefixes.read_from_disk(seq, len(source.places)) if source.is_cache else None
        if read is not None:
            self.waiting.park(seq, read)
            return True
        self.pool.add_reference(source.places)
        for victim in victims:
            self._evict(victim, step)
        self.waiting.remove(seq)
        seq.level = level
        seq.waited_s += max(0.0, self._now_s - seq.waiting_since_s)
        source.load(seq, self.pool)
        seq.block_ids += self.pool.allocate(self.pool.blocks_for(len(seq.tokens)) - len(seq.block_ids))
        if not seq.starts:
            seq.num_cached = min(source.num_tokens, seq.prompt_len)  # a resumed output may be cached too
        self._start(seq, source.num_tokens, source.num_tokens // self.pool.block_size)
        step.start(seq)
        return True

    def _missing(self, seq: Sequence, source: KvSource, lower: list[Sequence]) -> int:
        """Returns how many free blocks are missing to start a waiting sequence. It needs blocks for its tokens and one
        more, and one block must stay free for each running sequence that it may not evict and that still grows.
        """
        size = self.pool.block_size
        growing = sum(len(each.block_ids) * size < each.max_len for each in self.running)
        growing -= sum(len(each.block_ids) * size < each.max_len for each in lower)
        own = self.pool.blocks_for(len(seq.tokens) + 1) - len(source.places) + self.pool.num_taken(source.places)
        return own + growing - self.pool.num_free

    def _may_run_to_its_end(self, seq: Sequence) -> bool:
        """Returns whether all protected sequences fit into the pool together, so that none has to be evicted again."""
        if not is_protected(seq):
            return True
        protected = [each for each in self.running if is_protected(each)]
        return sum(self.pool.blocks_for(each.max_len) for each in [*protected, seq]) <= self.pool.num_blocks

    def _start(self, seq: Sequence, num_computed: int, num_registered: int) -> None:
        seq.starts += 1
        seq.num_computed, seq.num_registered, seq.asks_disk = num_computed, num_registered, True
        seq.rank = self.policy.rank(seq)
        seq.parent = None
        insort(self.running, seq, key=lambda each: each.rank)
        self._prefixes.promise(seq)
        if num_computed >= seq.prompt_len:
            self.waiting.wake(seq.seq_id)

    def _victims(self, lower: list[Sequence], missing: int, wanted: tuple[int, ...]) -> list[Sequence]:
        if not lower:
            return []

        def tokens_lost(seq: Sequence) -> float:
            return preemption_cost(seq, self.pool, self._prefixes.computed(seq), self._swap_cost).tokens

        return choose_victims(lower, missing, self.pool, set(wanted), tokens_lost)

    def _evict(self, seq: Sequence, step: StepBuilder) -> None:
        """Evicts a running sequence. Without a swap its blocks stay cached, so that a quick resume is a prefix hit."""
        step.evict(seq)
        self.running.remove(seq)
        self._withdraw_promises(seq)
        hashes = self._prefixes.computed(seq)
        swap = preemption_cost(seq, self.pool, hashes, self._swap_cost).swap
        host_ids = self.pool.save(seq.block_ids[: len(hashes)], hashes) if swap else []
        saved = seq.num_computed if host_ids else 0
        self._release(seq)
        seq.host_ids, seq.num_computed = host_ids, saved
        seq.preemptions += 1
        self.preemptions += 1
        seq.waiting_since_s = self._now_s
        self.waiting.push(seq)

    def _withdraw_promises(self, seq: Sequence) -> None:
        """Wakes the sequences that wait for blocks that this one would have computed."""
        for block_hash in self._prefixes.withdraw(seq):
            self.waiting.wake(block_hash)
        self.waiting.wake(seq.seq_id)

    def _release(self, seq: Sequence) -> None:
        self.pool.free(seq.block_ids)
        self.pool.free_host(seq.host_ids)
        seq.block_ids, seq.host_ids, seq.num_computed = [], [], 0
