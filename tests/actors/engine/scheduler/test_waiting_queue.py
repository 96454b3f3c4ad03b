"""The order of service: priorities, deadlines and ageing; who waits for another's prefix; samples of one prompt."""

from __future__ import annotations

import pytest
from tests.actors.engine.life import Life, sequence

from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.scheduler.policy import SchedulingPolicy
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.scheduler.waiting_queue import WaitingQueue
from raytide.actors.engine.sequence import Sequence


def life(**options: object) -> Life:
    fields = {"max_running": 1, "max_batch_tokens": 16, "ageing_s": 10.0} | options
    return Life(Scheduler(BlockPool(60, 2), **fields))  # type: ignore[arg-type]


def order_of_service(engine: Life) -> list[str]:
    order: list[str] = []
    while engine.scheduler.has_work:
        order += [chunk.seq.seq_id for chunk in engine.step().chunks if chunk.seq.seq_id not in order]
    return order


def endless(name: str, prompt: list[int], **fields: object) -> Sequence:
    seq = sequence(name, prompt, 20, **fields)
    seq.stop_token_ids = frozenset()
    return seq


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["a", "b", "c", "d"]),
        ("priority", ["b", "c", "d", "a"]),
        ("deadline", ["c", "b", "d", "a"]),
    ],
)
def test_who_is_served_first(policy: str, order: list[str]) -> None:
    engine = life(policy=policy)
    engine.add(sequence("a", [1], 2, priority=1, deadline_s=0.5))
    engine.add(sequence("b", [2], 2, deadline_s=5.0))
    engine.add(sequence("c", [3], 2, deadline_s=1.0))
    engine.add(sequence("d", [4], 2))
    assert order_of_service(engine) == order


def test_what_another_engine_began_goes_before_new_requests_of_its_priority() -> None:
    engine = life()
    engine.add(endless("first", [1]))
    engine.step()
    engine.add(sequence("new", [2], 2))
    begun = sequence("begun", [3], 2)
    begun.tokens.append(4)
    engine.add(begun)
    engine.add(sequence("urgent", [5], 2, priority=-1))
    assert order_of_service(engine) == ["urgent", "first", "begun", "new"]


def test_what_gave_way_to_another_request_goes_behind_it() -> None:
    engine = life()
    engine.add(endless("first", [1]))
    engine.step()
    engine.add(sequence("new", [2], 2))
    begun = sequence("begun", [3], 2)
    begun.tokens.append(4)
    begun.gave_way = True
    engine.add(begun)
    assert order_of_service(engine) == ["first", "new", "begun"]


def test_a_request_without_a_deadline_is_not_kept_waiting_for_ever() -> None:
    engine = life(policy="deadline")
    engine.add(endless("first", [1]))
    engine.step()
    engine.add(sequence("patient", [2], 1))
    engine.now_s = 9.0
    engine.add(sequence("urgent", [3], 1, deadline_s=9.5))
    engine.now_s = 12.0
    engine.add(sequence("late", [4], 1, deadline_s=12.5))
    assert order_of_service(engine) == ["first", "urgent", "patient", "late"]


def test_waiting_makes_up_for_priority() -> None:
    engine = life()
    engine.add(endless("first", [1]))
    engine.step()
    engine.add(sequence("low", [2], 1, priority=2))
    engine.now_s = 21.0
    engine.add(sequence("high", [3], 1, priority=0))
    assert order_of_service(engine) == ["first", "low", "high"]


def test_waiting_gives_no_right_to_evict_but_protects_from_it() -> None:
    engine = life()
    engine.add(endless("first", [1], priority=1))
    engine.step()
    old = engine.add(endless("old", [2], priority=1))
    engine.now_s = 15.0
    assert not engine.step().preempted
    while not old.block_ids:
        engine.step()
    engine.add(sequence("high", [3], 1, priority=0))
    assert not engine.step().preempted


def test_a_better_request_goes_before_a_worse_ones_half_done_prefill() -> None:
    engine = life(max_running=4, max_batch_tokens=8)
    engine.add(sequence("long", [1] * 40, 2, priority=1))
    engine.step()
    engine.add(sequence("high", [2] * 6, 2, priority=0))
    plan = engine.step()
    assert [(chunk.seq.seq_id, chunk.length) for chunk in plan.chunks] == [("high", 6), ("long", 2)]


def test_a_prompt_that_is_being_computed_is_waited_for() -> None:
    engine = life(max_running=4, max_batch_tokens=8)
    shared = list(range(10, 30))
    first, second = engine.add(sequence("first", shared, 3)), engine.add(sequence("second", [*shared, 9], 3))
    other = engine.add(sequence("other", [1], 1))
    lengths: dict[str, int] = {}
    while not second.output_len:
        for chunk in engine.step().chunks:
            lengths[chunk.seq.seq_id] = lengths.get(chunk.seq.seq_id, 0) + chunk.length
        assert len(engine.scheduler.waiting) + len(engine.scheduler.running) == len(engine.alive)
    assert lengths["second"] <= 2 * engine.scheduler.pool.block_size
    assert other.output_len == 1
    assert second.block_ids[:9] == first.block_ids[:9] or first.finish_reason


def test_nobody_waits_for_a_worse_ones_prefill() -> None:
    engine = life(max_running=4, max_batch_tokens=8)
    shared = list(range(10, 30))
    engine.add(sequence("low", shared, 3, priority=1))
    engine.step()
    high = engine.add(sequence("high", shared, 3, priority=0))
    assert high in [chunk.seq for chunk in engine.step().chunks]


def test_who_waits_for_a_prompt_goes_on_when_its_maker_is_gone() -> None:
    engine = life(max_running=4, max_batch_tokens=8)
    shared = list(range(10, 30))
    first, second = engine.add(sequence("first", shared, 3)), engine.add(sequence("second", shared, 3))
    engine.step()
    engine.scheduler.finish(first, "abort")
    engine.alive.remove(first)
    assert [chunk.seq for chunk in engine.step().chunks] == [second]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_samples_share_the_full_blocks_of_their_prompt_and_copy_the_last(prefix_cache: bool) -> None:
    engine = life(max_running=4, prefix_cache=prefix_cache)
    parent = engine.add(endless("parent", [1, 2, 3, 4, 5, 6]))
    children = [engine.fork(parent, endless(f"child{at}", [1, 2, 3, 4, 5, 6])) for at in range(2)]
    assert [chunk.seq for chunk in engine.step().chunks] == [parent]
    plan = engine.step()
    assert {chunk.seq.seq_id: chunk.length for chunk in plan.chunks} == {"parent": 1, "child0": 1, "child1": 1}
    assert [source for source, _ in plan.copies] == [parent.block_ids[2]] * 2
    for child in children:
        assert child.block_ids[:2] == parent.block_ids[:2]
        assert child.block_ids[2] != parent.block_ids[2]
    engine.run()


def test_aborted_requests_leave_nothing_in_the_queue() -> None:
    waiting = WaitingQueue(SchedulingPolicy())
    for at in range(1000):
        seq = sequence(f"s{at}", [1], 1, priority=at % 3, arrival=at)
        waiting.push(seq)
        if at % 2:
            waiting.park(seq, "somebody")
        waiting.remove(seq)
    assert len(waiting) == 0
    assert waiting.head(0.0) is None
    assert sum(len(heap) for heap in waiting._heaps.values()) <= 64
    assert not waiting._parked


@pytest.mark.parametrize("urgency", [-1, -(10**9)])
def test_no_flood_of_urgent_requests_keeps_a_plain_one_waiting_for_ever(urgency: int) -> None:
    """Neither one that runs nor one that waits: it is evicted a few times at most, and gets more urgent as it waits."""
    engine = life(ageing_s=1.0)
    plain = [sequence("running", [1], 30), sequence("waiting", [2], 3)]
    engine.add(plain[0])
    engine.step()
    engine.add(plain[1])
    for turn in range(600):
        engine.now_s += 1.0
        engine.add(sequence(f"urgent {turn}", [4, turn % 3], 2, priority=urgency))
        engine.step()
    assert all(seq.finish_reason in ("stop", "length") for seq in plain)
