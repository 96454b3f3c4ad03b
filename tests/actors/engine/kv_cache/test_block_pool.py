"""The pool of blocks: what is kept, what is forgotten first, and what moves to the host and back."""

from __future__ import annotations

import pytest
from tests.actors.engine.life import FakeDisk, Life, sequence

from raytide.actors.engine.kv_cache.block_pool import BlockPool, chain_hash
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.sequence import StepPlan
from raytide.core.errors import ConfigError


def cached(pool: BlockPool, *names: bytes) -> list[int]:
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.register(block, name)
    return blocks


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds nothing"):
        BlockPool(0, 16)


def test_hashes_depend_on_all_tokens_before_and_on_the_salt() -> None:
    first = chain_hash(b"", [1, 2])
    assert chain_hash(first, [3, 4]) != chain_hash(chain_hash(b"", [2, 1]), [3, 4])
    assert chain_hash(b"salt", [1, 2]) != first
    assert len(first) == 16


def test_blocks_that_cache_nothing_are_taken_first_and_the_end_of_a_prefix_before_its_start() -> None:
    pool = BlockPool(5, 2)
    prefix, plain = cached(pool, b"a", b"b", b"c"), pool.allocate(2)
    pool.free(prefix)
    pool.free(plain)
    assert set(pool.allocate(2)) == set(plain)
    assert pool.allocate(1) == [prefix[2]]
    assert [block for _, block in pool.match([b"a", b"b", b"c"])] == prefix[:2]


def test_what_was_used_last_is_forgotten_last() -> None:
    pool = BlockPool(3, 2)
    for name in (b"a", b"b", b"c"):
        pool.free(cached(pool, name))
    used = pool.match([b"a"])
    pool.add_reference(used)
    pool.free([block for _, block in used])
    pool.allocate(2)
    assert pool.match([b"a"]) and not pool.match([b"b"]) and not pool.match([b"c"])


def test_a_cold_prefix_comes_back_from_the_host() -> None:
    engine = Life(Scheduler(BlockPool(8, 2, 20), max_running=1, max_batch_tokens=32, swap_cost=SwapCost(0.5)))
    prompt = [1, 2, 4, 5, 6, 7, 8, 9, 10]
    for at, tokens in enumerate((prompt, [20] * 12)):
        engine.add(sequence(f"s{at}", tokens, 1))
        engine.run()
    again = engine.add(sequence("again", prompt, 1))
    plan = engine.step()
    assert plan.swap_in
    assert again.num_cached == 8
    assert plan.chunks[0].length == 1


def test_moving_what_is_cheaper_to_compute_is_not_worth_it() -> None:
    engine = Life(Scheduler(BlockPool(8, 2, 20), max_running=1, max_batch_tokens=32, swap_cost=SwapCost(2.0)))
    for at, token in enumerate((1, 2, 4)):
        engine.add(sequence(f"s{at}", [token] * 12, 1))
        assert not engine.step().swap_out


def test_the_host_forgets_its_own_coldest_prefix_and_nothing_of_a_swapped_sequence() -> None:
    pool = BlockPool(2, 2, 2)
    held = cached(pool, b"mine")
    (saved,) = pool.save(held, [b"mine"])
    pool.take_moves(StepPlan())
    for name in (b"a", b"b", b"c", b"d"):
        pool.free(cached(pool, name))
        pool.take_moves(plan := StepPlan())
        assert saved not in [to for _, to in plan.swap_out]
    assert pool.host.find(b"mine") == saved
    assert pool.host.find(b"c") is not None
    assert pool.host.find(b"a") is None


def test_a_changed_weight_forgets_everything() -> None:
    engine = Life(Scheduler(BlockPool(8, 2, 20), max_running=1, max_batch_tokens=32, swap_cost=SwapCost(0.5)))
    prompt = [1, 2, 4, 5, 6, 7, 8, 9, 10]
    for at, tokens in enumerate((prompt, [20] * 12)):
        engine.add(sequence(f"s{at}", tokens, 1))
        engine.run()
    engine.scheduler.invalidate()
    again = engine.add(sequence("again", prompt, 1))
    engine.step()
    assert again.num_cached == 0


def test_adopted_kv_is_not_computed_and_is_offered_to_others() -> None:
    engine = Life(Scheduler(BlockPool(20, 2), max_running=2, max_batch_tokens=32))
    prompt = [1, 2, 4, 5, 6, 7, 8]
    seq = sequence("adopted", prompt, 4)
    assert engine.scheduler.adopt(seq, 6)
    engine.memory.fill(seq)
    engine.alive.append(seq)
    assert engine.step().num_tokens == 1
    other = engine.add(sequence("other", prompt, 4))
    engine.step()
    assert other.num_cached == 6
    assert not engine.scheduler.adopt(sequence("no place", prompt, 4), 6)


def test_a_block_that_is_copied_is_not_given_away_before_the_copy_is_made() -> None:
    pool = BlockPool(3, 2)
    source = pool.allocate(1)
    own = pool.copy(source[0])
    pool.free(source)
    assert pool.num_free == 1
    pool.take_moves(plan := StepPlan())
    assert plan.copies == [(source[0], own)]
    assert pool.num_free == 2


def test_a_block_that_is_not_to_be_trusted_is_removed_from_the_disk_too() -> None:
    disk = FakeDisk()
    pool = BlockPool(4, 2, disk=disk)
    own, shared = cached(pool, b"own"), cached(pool, b"shared")
    pool.add_reference([(False, shared[0])])
    disk.stored = {b"own": [None], b"shared": [None], b"other": [None]}
    assert pool.discard([*own, *shared]) == own
    assert disk.stored.keys() == {b"shared", b"other"}
