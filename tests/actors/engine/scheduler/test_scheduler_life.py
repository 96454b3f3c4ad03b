"""Random lives of requests against a model of what the KV memory holds: at least 10,000 steps a run."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.actors.engine.life import FakeDisk, Guesses, Life, sequence, tokens_alone

from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.scheduler.policy import MOST_EVICTIONS, is_protected
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.sequence import Sequence, StepPlan

AGEING_S = 10.0
LEAST_STEPS = 10_000
# Few different prompts, so that prefixes are shared, in whole and in part.
PROMPTS = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(1, 14).map(lambda length: [0, 1, 2, 0, 1, 1, 2, 0, 0, 1, 2, 2, 1, 0][:length]),
)


class Machine(RuleBasedStateMachine):
    steps = 0
    hits = 0  # blocks that came from the disk

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(6, 24),
        host=st.sampled_from([0, 2, 6, 30]),
        max_running=st.integers(1, 6),
        extra_budget=st.integers(0, 6),
        prefix_cache=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["fcfs", "priority", "priority", "deadline"]),
        cost=st.sampled_from([0.1, 1.0, 3.0, None]),
        drafts=st.booleans(),
        slowdown=st.sampled_from([None, 1.0, 1.15, 2.0]),
        disk=st.sampled_from([None, None, 0, 2]),
    )
    def build(
        self,
        block_size: int,
        num_blocks: int,
        host: int,
        max_running: int,
        extra_budget: int,
        prefix_cache: bool,
        policy: str,
        cost: float | None,
        drafts: bool,
        slowdown: float | None,
        disk: int | None,
    ) -> None:
        self.disk = None if disk is None else FakeDisk(disk)
        self.pool = BlockPool(num_blocks, block_size, host, self.disk)
        self.max_running, self.budget = max_running, max_running + extra_budget
        self.scheduler = Scheduler(
            self.pool,
            max_running=max_running,
            max_batch_tokens=self.budget,
            prefix_cache=prefix_cache,
            policy=policy,  # type: ignore[arg-type]
            ageing_s=AGEING_S,
            swap_cost=None if cost is None else SwapCost(cost),
            drafter=Guesses() if drafts else None,
            team_slowdown=slowdown,
            step_seconds=lambda tokens: 3.0 + tokens,
        )
        self.shares = slowdown is not None  # then those that are kept out of a step neither advance nor overtake
        self.life = Life(self.scheduler)
        self.count = 0
        self.dropped: set[str] = set()  # by changed weights, since the last step
        self.passed_over: Sequence | None = None  # waited in the last step though somebody could have made room

    def new(self, prompt: list[int], max_new: int, priority: int, deadline_s: float, salt: bytes) -> Sequence:
        self.count += 1
        seq = sequence(f"s{self.count}", prompt, max_new, priority=priority, salt=salt)
        seq.deadline_s = self.life.now_s + deadline_s
        seq.reads_cache = self.count % 7 > 0
        seq.team, seq.weight = [("a", 1.0), ("b", 1.0), ("b", 1.0), ("c", 3.0)][self.count % 4]
        seq.max_len = min(seq.max_len, self.pool.num_blocks * self.pool.block_size)
        assume(seq.max_len > len(prompt))
        return seq

    @rule(
        prompt=PROMPTS,
        ends=st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=6),
        max_new=st.integers(1, 16),
        priority=st.sampled_from([0, 1, 1, 3]),
        deadline_s=st.sampled_from([1.0, 20.0, math.inf]),
        salt=st.sampled_from([b"", b"", b"", b"other"]),
    )
    def add_requests_of_one_prefix(
        self, prompt: list[int], ends: list[list[int]], max_new: int, priority: int, deadline_s: float, salt: bytes
    ) -> None:
        for at, end in enumerate(ends):
            self.life.add(self.new(prompt + end, max_new + at, priority, deadline_s, salt))

    @rule(prompt=PROMPTS, max_new=st.integers(1, 12), priority=st.integers(0, 2), samples=st.integers(2, 4))
    def add_samples_of_one_prompt(self, prompt: list[int], max_new: int, priority: int, samples: int) -> None:
        parent = self.life.add(self.new(prompt, max_new, priority, math.inf, b""))
        for _ in range(samples - 1):
            self.life.fork(parent, self.new(prompt, max_new, priority, math.inf, b""))

    @precondition(lambda self: self.life.alive and self.count % 3 == 1)
    @rule(data=st.data(), max_new=st.integers(1, 12))
    def fork_late(self, data: st.DataObject, max_new: int) -> None:
        parent = data.draw(st.sampled_from(self.life.alive))
        child = self.new(parent.tokens[: parent.prompt_len], max_new, parent.priority, math.inf, parent.salt)
        self.life.fork(parent, child)

    @precondition(lambda self: self.count % 3 == 0)
    @rule(prompt=PROMPTS, max_new=st.integers(1, 12), data=st.data())
    def adopt(self, prompt: list[int], max_new: int, data: st.DataObject) -> None:
        seq = self.new(prompt, max_new, 1, math.inf, b"")
        seq.arrival_s = self.life.now_s
        free, running = self.pool.num_free, len(self.scheduler.running)
        if self.scheduler.adopt(seq, data.draw(st.integers(0, len(prompt) - 1))):
            self.life.memory.fill(seq)
            self.life.alive.append(seq)
        else:
            assert free < self.pool.blocks_for(len(prompt)) or running == self.max_running
            assert not seq.block_ids

    @precondition(lambda self: self.life.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.life.alive))
        self.scheduler.finish(seq, "abort")
        self.life.alive.remove(seq)

    @precondition(lambda self: self.count % 8 == 7)
    @rule()
    def invalidate(self) -> None:
        self.dropped |= {seq.seq_id for seq in self.scheduler.running}
        self.scheduler.invalidate()
        self.life.memory.version += 1
        if self.disk is not None:
            self.disk.stored.clear()  # another folder
        for seq in self.life.alive:
            seq.salt += b"'"

    @rule(count=st.integers(1, 12), passed_s=st.sampled_from([0.0, 0.1, 6.0]))
    def step(self, count: int, passed_s: float) -> None:
        for _ in range(count):
            self.life.now_s += passed_s
            self.advance()

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def step_on_which_one_breaks(self, data: st.DataObject) -> None:
        plan = self.plan()
        assume(plan.chunks)
        poisoned = data.draw(st.sampled_from([chunk.seq for chunk in plan.chunks]))
        self.life.execute(plan, poisoned)

    def advance(self) -> None:
        first = self.scheduler.running[0] if self.scheduler.running else None
        had_work, before = self.scheduler.has_work, list(self.life.alive)
        plan = self.plan()
        advanced = {chunk.seq.seq_id for chunk in plan.chunks}
        # What comes from the disk is held for one step, in which somebody else may lack room for it.
        waits = self.disk is not None and (self.disk.reads or self.disk.came) and not self.scheduler.running
        assert bool(advanced) == had_work or waits, "a step without progress"
        if first is not None and not self.shares:
            better = [seq for seq in self.scheduler.running if seq.rank < first.rank]
            assert first.seq_id in advanced or better, "the first in rank did not advance"
        self.life.execute(plan)
        for seq in before:
            if seq.finish_reason in ("stop", "length"):
                assert seq.tokens == tokens_alone(seq)
        Machine.steps += 1

    def plan(self) -> StepPlan:
        before = list(self.scheduler.running)
        plan = self.scheduler.plan(self.life.now_s)
        self.check(plan)
        planned = {chunk.seq.seq_id for chunk in plan.chunks}
        assert not {seq.seq_id for seq in plan.preempted} & planned - self.dropped, "evicted and started in one step"
        self.dropped = set()
        lacking = [seq for seq in before if seq.block_ids and seq.num_pending == 1 and seq.seq_id not in planned]
        started = [chunk.seq for chunk in plan.chunks if chunk.seq not in before]
        assert self.shares or all(seq.rank < each.rank for seq in started for each in lacking), (
            "one that lacks a block is overtaken"
        )
        return plan

    def check(self, plan: StepPlan) -> None:
        running = self.scheduler.running
        assert plan.num_tokens <= self.budget
        assert len({chunk.seq.seq_id for chunk in plan.chunks}) == len(plan.chunks) <= len(running) <= self.max_running
        for chunk in plan.chunks:
            assert chunk.length >= 1
            assert chunk.start == chunk.seq.num_computed
            assert chunk.seq in running
            assert self.pool.blocks_for(chunk.start + chunk.length) <= len(chunk.seq.block_ids)
        self.check_order(plan)

    def check_order(self, plan: StepPlan) -> None:
        """Nobody waits for more than a step whose place a running one of lower priority could make."""
        passed_over, self.passed_over = self.passed_over, None
        scheduler, now_s = self.scheduler, self.life.now_s
        head = scheduler.waiting.head(now_s)
        if self.shares or head is None or plan.num_tokens == self.budget or any(seq is head for seq in plan.preempted):
            return
        level = scheduler.policy.level(head, now_s)
        lower = [seq for seq in scheduler.running if scheduler.policy.may_evict(head, level, seq)]
        if not lower or is_protected(head):
            return
        stalled = {seq.seq_id for seq in scheduler.running} - {chunk.seq.seq_id for chunk in plan.chunks}
        if any(seq.seq_id in stalled for seq in scheduler.running if seq.rank[0] <= level):
            return
        refs = self.pool.device.refs
        freed = sum(refs[block] == 1 for seq in lower for block in seq.block_ids)
        others = len(scheduler.running) - len(lower)
        if self.pool.num_free + freed >= self.pool.blocks_for(len(head.tokens) + 1) + others:
            self.passed_over = head
            assert head is not passed_over, "priorities are inverted for longer than one step"

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        alive, scheduler = self.life.alive, self.scheduler
        self.pool.check([seq.block_ids for seq in alive], [seq.host_ids for seq in alive])
        self.life.memory.check_index()
        waiting = list(scheduler.waiting)
        assert {seq.arrival for seq in [*scheduler.running, *waiting]} == {seq.arrival for seq in alive}
        assert len(waiting) == len(scheduler.waiting)
        assert len(alive) == len(waiting) + len(scheduler.running)
        assert [seq.rank for seq in scheduler.running] == sorted(seq.rank for seq in scheduler.running)
        for seq in waiting:
            assert not seq.block_ids
            assert bool(seq.host_ids) == bool(seq.num_computed)
            self.life.memory.check_sequence(seq, seq.host_ids, self.life.memory.host, seq.num_computed)
        for seq in scheduler.running:
            self.life.memory.check_sequence(seq, seq.block_ids, self.life.memory.device, seq.num_computed)
        assert all(seq.preemptions <= MOST_EVICTIONS for seq in alive)

    def teardown(self) -> None:
        """Whatever happened, everybody finishes in a bounded number of steps and the pools are whole again."""
        if not hasattr(self, "pool"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.life.now_s += 0.5
            self.advance()
        assert not self.scheduler.has_work
        assert not len(self.scheduler.waiting)
        Machine.hits += self.disk.hits if self.disk is not None else 0
        self.pool.check([], [])


def test_random_lives() -> None:
    Machine.steps = Machine.hits = 0
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=90, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert Machine.steps >= LEAST_STEPS
    assert Machine.hits > 20
