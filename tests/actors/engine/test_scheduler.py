"""The scheduler and its pool, without a model: random lives of requests against their invariants."""

import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raytide.actors.engine.blocks import BlockPool
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.scheduler import Scheduler
from raytide.actors.engine.sequence import Sequence, StepPlan
from raytide.core.errors import UsageError

STOP = 3
GREEDY = SamplingParams(temperature=0)


def sequence(name: str, prompt: list[int], max_new: int) -> Sequence:
    return Sequence(name, list(prompt), len(prompt), GREEDY, len(prompt) + max_new, frozenset({STOP}), seed=0)


class Life(RuleBasedStateMachine):
    """A fake model says token ids drawn by Hypothesis; `written` is what the KV of each block would hold."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 16),
        max_running=st.integers(1, 5),
        extra_budget=st.integers(0, 6),
        prefix_cache=st.booleans(),
    )
    def build(self, block_size: int, num_blocks: int, max_running: int, extra_budget: int, prefix_cache: bool) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.max_running, self.budget = max_running, max_running + extra_budget
        self.scheduler = Scheduler(
            self.pool, max_running=max_running, max_batch_tokens=self.budget, prefix_cache=prefix_cache
        )
        self.alive: list[Sequence] = []
        self.count = 0
        self.written: dict[int, list[int]] = {}  # slot -> all tokens up to its own

    @rule(prompt=st.lists(st.integers(0, 4), min_size=1, max_size=12), max_new=st.integers(1, 8))
    def add(self, prompt: list[int], max_new: int) -> None:
        seq = sequence(f"s{self.count}", prompt, max_new)
        self.count += 1
        if self.pool.blocks_for(seq.max_len) > self.pool.num_blocks:
            with pytest.raises(UsageError, match="KV"):
                self.scheduler.add(seq)
            return
        self.scheduler.add(seq)
        self.alive.append(seq)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.alive))
        self.scheduler.finish(seq, "abort")
        self.alive.remove(seq)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.advance(lambda: data.draw(st.integers(0, 5)))

    def advance(self, next_token: object) -> None:
        oldest = min(self.alive, key=lambda seq: seq.arrival, default=None)
        plan = self.scheduler.plan()
        self.check_plan(plan)
        if oldest is not None:
            assert any(chunk.seq is oldest for chunk in plan.chunks), "the oldest sequence did not advance"
        self.write(plan)
        sampled = {chunk.seq.seq_id: next_token() for chunk in plan.chunks if chunk.samples}  # type: ignore[operator]
        self.scheduler.commit(plan, sampled)
        self.alive = [seq for seq in self.alive if seq.finish_reason is None]

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.budget
        assert len({chunk.seq.seq_id for chunk in plan.chunks}) == len(plan.chunks) <= self.max_running
        for chunk in plan.chunks:
            assert chunk.length >= 1
            assert chunk.start == chunk.seq.num_computed
            assert self.pool.blocks_for(chunk.start + chunk.length) <= len(chunk.seq.block_ids)
        assert not {seq.seq_id for seq in plan.preempted} & {chunk.seq.seq_id for chunk in plan.chunks}

    def write(self, plan: StepPlan) -> None:
        """Write the step's KV as the runner would, and see that what it reads is the sequence's own prefix."""
        slots = [
            self.slot(chunk.seq, at) for chunk in plan.chunks for at in range(chunk.start, chunk.start + chunk.length)
        ]
        assert len(set(slots)) == len(slots), "two tokens share a slot"
        for chunk in plan.chunks:
            for at in range(chunk.start, chunk.start + chunk.length):
                self.written[self.slot(chunk.seq, at)] = chunk.seq.tokens[: at + 1]
        for chunk in plan.chunks:
            for at in range(chunk.start + chunk.length):
                assert self.written[self.slot(chunk.seq, at)] == chunk.seq.tokens[: at + 1], "another's KV"

    def slot(self, seq: Sequence, at: int) -> int:
        size = self.pool.block_size
        return seq.block_ids[at // size] * size + at % size

    @invariant()
    def pool_and_queues_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([seq.block_ids for seq in self.alive])
        queues = [*self.scheduler.running, *self.scheduler.waiting]
        assert [seq.arrival for seq in queues] == sorted(seq.arrival for seq in self.alive), "order of service is lost"
        assert len(self.scheduler.running) <= self.max_running
        assert all(not seq.block_ids for seq in self.scheduler.waiting)

    def teardown(self) -> None:
        """Whatever happened, everybody finishes in a bounded number of steps and the pool is whole again."""
        if not hasattr(self, "pool"):
            return
        steps = 0
        while self.scheduler.has_work:
            self.advance(lambda: 4)
            steps += 1
            assert steps < 2000
        assert self.pool.num_free == self.pool.num_blocks
        self.pool.check([])


Life.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLife = Life.TestCase


def run(scheduler: Scheduler, token: int = 4) -> StepPlan:
    plan = scheduler.plan()
    scheduler.commit(plan, {chunk.seq.seq_id: token for chunk in plan.chunks if chunk.samples})
    return plan


def test_decodes_go_on_while_a_long_prompt_is_prefilled_in_chunks() -> None:
    scheduler = Scheduler(BlockPool(100, 4), max_running=4, max_batch_tokens=8)
    short, long = sequence("short", [1, 2], 20), sequence("long", [1] * 30, 5)
    scheduler.add(short)
    run(scheduler)
    scheduler.add(long)
    lengths = []
    while long.num_pending > 1:
        plan = run(scheduler)
        assert plan.chunks[0].seq is short
        lengths.append(plan.chunks[1].length)
    assert lengths == [7, 7, 7, 7, 2]


def test_the_latest_arrival_is_preempted_and_comes_back_before_newcomers() -> None:
    scheduler = Scheduler(BlockPool(4, 2), max_running=3, max_batch_tokens=16, prefix_cache=False)
    first, second = sequence("first", [1, 1, 1], 4), sequence("second", [2, 2, 2], 4)
    scheduler.add(first)
    scheduler.add(second)
    run(scheduler)
    scheduler.add(sequence("newcomer", [3], 1))
    run(scheduler)
    plan = run(scheduler)
    assert [seq.seq_id for seq in plan.preempted] == ["second"]
    assert [seq.seq_id for seq in scheduler.waiting] == ["second", "newcomer"]


def test_a_second_request_shares_the_blocks_of_the_first_ones_prefix() -> None:
    scheduler = Scheduler(BlockPool(16, 2), max_running=3, max_batch_tokens=16)
    first, second = sequence("first", [1, 2, 3, 4, 5], 3), sequence("second", [1, 2, 3, 4, 9], 3)
    scheduler.add(first)
    run(scheduler)
    scheduler.add(second)
    run(scheduler)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.num_cached == 4


def test_the_scheduler_loads_no_torch() -> None:
    import subprocess

    code = "import sys, raytide.actors.engine.scheduler, raytide.actors.engine.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "platform"}, timeout=60).returncode == 0
