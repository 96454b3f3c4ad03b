"""Preemption chooses the right victim in the right way, and costs nobody a token."""

from __future__ import annotations

import pytest
from tests.actors.engine.life import Life, sequence, tokens_alone

from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.scheduler.policy import MOST_EVICTIONS
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.sequence import Sequence, StepPlan

QUICK, SLOW = SwapCost(0.5), SwapCost(50.0)


def life(num_blocks: int = 40, host: int = 0, cost: SwapCost | None = None, **options: object) -> Life:
    fields = {"max_running": 4, "max_batch_tokens": 16, "ageing_s": 10.0, "swap_cost": cost} | options
    return Life(Scheduler(BlockPool(num_blocks, 2, host), **fields))  # type: ignore[arg-type]


def fill(engine: Life, count: int, prompt_len: int = 4, max_new: int = 20, priority: int = 1) -> list[Sequence]:
    """Running sequences that share nothing and never stop by themselves."""
    seqs = [sequence(f"low{at}", [10 + at] * prompt_len, max_new, priority=priority) for at in range(count)]
    for seq in seqs:
        seq.stop_token_ids = frozenset()
        engine.add(seq)
    while any(seq.num_pending != 1 or not seq.block_ids for seq in seqs):
        engine.step()
    return seqs


def names(plan: StepPlan) -> list[str]:
    return [seq.seq_id for seq in plan.preempted]


def steps_until_first_token(engine: Life, seq: Sequence) -> int:
    steps = 0
    while not seq.output_len:
        engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("host", [0, 100])
@pytest.mark.parametrize(
    "full_of",
    [{"max_running": 4}, {"num_blocks": 13, "max_running": 9}],
    ids=["places", "blocks"],
)
def test_a_better_request_at_a_full_engine_has_its_first_token_with_its_own_prefill(
    full_of: dict[str, int], host: int
) -> None:
    engine = life(host=host, cost=QUICK, **full_of)
    lows = fill(engine, 4, max_new=8)
    high = engine.add(sequence("high", [5] * 10, 3, priority=0))
    assert steps_until_first_token(engine, high) == 1
    assert engine.scheduler.preemptions > 0
    engine.run()
    assert high.tokens == tokens_alone(high)
    assert all(len(seq.tokens) == seq.max_len for seq in lows)


def test_a_long_prompt_of_a_better_request_takes_only_the_steps_that_its_budget_needs() -> None:
    engine = life(num_blocks=60, max_running=4, max_batch_tokens=8)
    fill(engine, 4)
    high = engine.add(sequence("high", [5] * 20, 3, priority=0))
    assert steps_until_first_token(engine, high) == 4  # three of the four still decode, and leave 5 tokens a step


def test_an_equal_evicts_nobody() -> None:
    engine = life()
    fill(engine, 4)
    engine.add(sequence("equal", [5], 3, priority=1))
    assert names(engine.step()) == []


@pytest.mark.parametrize(("cost", "swaps"), [(QUICK, True), (SLOW, False)])
def test_the_cheaper_of_swap_and_recompute_is_chosen(cost: SwapCost, swaps: bool) -> None:
    engine = life(host=100, cost=cost, max_running=1, prefix_cache=False)
    (low,) = fill(engine, 1, prompt_len=9)
    computed = low.num_computed
    engine.add(sequence("high", [5], 1, priority=0))
    plan = engine.step()
    assert names(plan) == ["low0"]
    assert bool(plan.swap_out) == swaps
    plan = engine.step()
    assert bool(plan.swap_in) == swaps
    assert (plan.chunks[0].start, plan.chunks[0].length) == ((computed, 1) if swaps else (0, computed + 1))


def test_what_others_hold_too_need_not_be_computed_again_so_it_is_not_swapped() -> None:
    engine = life(host=100, cost=SwapCost(0.9), max_running=2)
    shared = [7] * 8
    for name in ("first", "second"):
        engine.add(sequence(name, [*shared, 1], 20, priority=1)).stop_token_ids = frozenset()
        engine.step()
    engine.step()
    engine.add(sequence("high", [5], 1, priority=0))
    plan = engine.step()
    assert names(plan) == ["second"]
    assert not plan.swap_out


def test_the_lowest_class_loses_first_then_who_has_least_to_lose() -> None:
    engine = life(max_running=4)
    fill(engine, 2, prompt_len=3)
    long, short = sequence("long", [1] * 12, 20, priority=2), sequence("short", [2] * 4, 20, priority=2)
    for seq in (short, long):
        seq.stop_token_ids = frozenset()
        engine.add(seq)
    engine.step()
    evicted = []
    for at in range(3):
        engine.add(sequence(f"high{at}", [5 + at], 9, priority=0)).stop_token_ids = frozenset()
        evicted += names(engine.step())
    assert evicted == ["short", "long", "low1"]


def test_no_more_are_evicted_than_needed() -> None:
    engine = life(num_blocks=20, max_running=9)
    small, large = sequence("small", [1] * 4, 20, priority=1), sequence("large", [2] * 12, 20, priority=1)
    for seq in (small, large):
        seq.stop_token_ids = frozenset()
        engine.add(seq)
    engine.step()
    engine.add(sequence("high", [5] * 30, 2, priority=0))
    assert names(engine.step()) == ["large"]


def test_nobody_is_evicted_in_vain() -> None:
    engine = life(num_blocks=16, max_running=9)
    fill(engine, 1, prompt_len=10, priority=0)
    low = engine.add(sequence("low", [2] * 4, 9, priority=1))
    engine.step()
    assert low.block_ids
    engine.add(sequence("high", [5] * 24, 2, priority=0))
    assert names(engine.step()) == []


def test_the_evicted_go_before_newcomers_of_their_class_and_after_their_betters() -> None:
    engine = life(max_running=1)
    fill(engine, 1)
    engine.add(sequence("newcomer", [1], 1, priority=1))
    engine.add(sequence("high", [5], 3, priority=0)).stop_token_ids = frozenset()
    engine.step()
    engine.add(sequence("higher still", [6], 1, priority=0))
    order = []
    while engine.scheduler.has_work:
        running = [chunk.seq.seq_id for chunk in engine.step().chunks]
        order += [each for each in running if each not in order]
    assert order == ["high", "higher still", "low0", "newcomer"]


def test_nobody_is_evicted_for_ever() -> None:
    engine = life(max_running=1)
    (low,) = fill(engine, 1, max_new=30)
    for at in range(40):
        engine.add(sequence(f"high{at}", [5 + at % 3], 1, priority=0))
        engine.step()
        engine.step()
    assert low.preemptions == MOST_EVICTIONS
    engine.run()
    assert len(low.tokens) == low.max_len


def test_those_that_may_not_be_evicted_again_run_only_when_they_fit_together() -> None:
    engine = life(num_blocks=12, max_running=4, prefix_cache=False)
    first, second = (sequence(name, [at] * 3, 17, priority=1) for at, name in enumerate(("first", "second")))
    for seq in (first, second):
        seq.stop_token_ids = frozenset()
        seq.preemptions = MOST_EVICTIONS
        engine.add(seq)
    while first.finish_reason is None:
        assert [chunk.seq for chunk in engine.step().chunks] == [first]
    engine.run()
    assert first.preemptions == second.preemptions == MOST_EVICTIONS


def test_one_that_lacks_a_block_waits_in_place_instead_of_losing_its_own() -> None:
    engine = life(num_blocks=9, max_running=4, prefix_cache=False)
    first, _ = fill(engine, 2, prompt_len=3, max_new=7, priority=0)
    engine.add(sequence("newcomer", [3], 1, priority=0))
    alone = 0
    while first.finish_reason is None:
        alone += [chunk.seq for chunk in engine.step().chunks] == [first]
    assert alone > 0
    assert engine.scheduler.preemptions == 0
    engine.run()


def test_one_that_may_not_be_evicted_again_spares_another_such_for_a_better_request() -> None:
    engine = life(num_blocks=13, max_running=4, prefix_cache=False)
    for at in range(2):
        seq = engine.add(sequence(f"late{at}", [at + 1] * 3, 9, priority=3))
        seq.stop_token_ids, seq.preemptions = frozenset(), MOST_EVICTIONS
    engine.step()
    engine.add(sequence("high", [9] * 5, 9, priority=0)).stop_token_ids = frozenset()
    evicted = [name for _ in range(8) for name in names(engine.step())]
    assert evicted == ["high"]


def test_what_the_better_request_is_to_read_on_the_host_is_not_overwritten_by_its_victim() -> None:
    engine = life(num_blocks=7, host=6, cost=QUICK, max_running=1, max_batch_tokens=40)
    prefix = [1, 1, 2, 2]
    engine.add(sequence("first", [*prefix, 5], 1, priority=1))
    engine.run()
    (low,) = fill(engine, 1, prompt_len=9, max_new=5)
    while low.num_computed < 12:
        engine.step()
    high = engine.add(sequence("high", [*prefix, 6, 7], 2, priority=0))
    plan = engine.step()
    assert (names(plan), high.num_cached) == (["low0"], 4)
    engine.run()


def test_one_without_a_block_gives_its_token_of_a_full_step_to_its_better() -> None:
    engine = life(num_blocks=18, max_running=3, max_batch_tokens=3, prefix_cache=False)
    (decoding,) = fill(engine, 1, prompt_len=2, max_new=30, priority=3)
    long = engine.add(sequence("long", [5] * 24, 1, priority=0))
    while engine.scheduler.pool.num_free or decoding.num_computed < 2 * len(decoding.block_ids):
        engine.step()
    assert long.num_pending > 3, "it takes the rest of each step"
    better = engine.add(sequence("better", [6], 1, priority=0))
    assert names(engine.step()) == ["low0"]
    assert better.output_len == 1
    engine.run()
    assert decoding.tokens == tokens_alone(decoding)
