"""The scheduler's policy, in single cases. Random lives are in `test_scheduler_life.py`."""

import sys

from tests.actors.engine.life import sequence

from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.sequence import StepPlan


def run(scheduler: Scheduler, token: int = 4) -> StepPlan:
    plan = scheduler.plan()
    scheduler.commit(plan, {chunk.seq.seq_id: [token] for chunk in plan.chunks if chunk.yields_token})
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
    scheduler = Scheduler(BlockPool(5, 2), max_running=3, max_batch_tokens=16, prefix_cache=False)
    first, second = sequence("first", [1, 1, 1], 6), sequence("second", [2, 2, 2], 6)
    scheduler.add(first)
    scheduler.add(second)
    run(scheduler)
    scheduler.add(sequence("newcomer", [3], 1))
    while not (plan := run(scheduler)).preempted:
        pass
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

    modules = "raytide.actors.engine.scheduler.scheduler, raytide.actors.engine.backends.fake"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "platform"}, timeout=60).returncode == 0
