"""A gateway's model of a replica's prefix cache."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from raytide.gateway.replicas.routing.prefix_index import (
    BLOCK_TOKENS,
    MAX_BLOCKS,
    MAX_INDEXED_BLOCKS,
    PrefixIndex,
    join_keys,
    prefix_keys,
    root_key,
    split_keys,
)

ROOT = root_key(None, "")


def prompt(*blocks: int) -> list[int]:
    return [block for block in blocks for _ in range(BLOCK_TOKENS)]


def test_prompts_share_the_keys_of_their_common_start_alone() -> None:
    one, other = prefix_keys(prompt(1, 2, 3), ROOT), prefix_keys(prompt(1, 2, 4, 3), ROOT)
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


def test_an_unfinished_block_has_no_key() -> None:
    assert prefix_keys(prompt(1, 2)[:-1], ROOT) == prefix_keys(prompt(1), ROOT)


def test_adapters_and_salts_share_nothing() -> None:
    roots = [root_key(None, ""), root_key("a", ""), root_key(None, "a"), root_key("", "")]
    assert len({prefix_keys(prompt(1), root)[0] for root in roots}) == len(roots)


def test_keys_go_on_from_those_that_are_known() -> None:
    known = prefix_keys(prompt(1, 2), ROOT)
    assert prefix_keys(prompt(1, 2, 3, 4), ROOT, known) == prefix_keys(prompt(1, 2, 3, 4), ROOT)


def test_the_work_for_a_long_prompt_is_bounded() -> None:
    assert len(prefix_keys([7] * BLOCK_TOKENS * (MAX_BLOCKS + 5), ROOT)) == MAX_BLOCKS


def test_numbers_that_are_no_tokens_have_no_keys() -> None:
    assert prefix_keys([1 << 70] * BLOCK_TOKENS, ROOT) == []


def test_keys_survive_the_wire() -> None:
    keys = prefix_keys(prompt(1, 2, 3), ROOT)
    assert split_keys(join_keys(keys)) == keys


def test_the_end_of_the_least_recently_used_prompt_leaves_first() -> None:
    index = PrefixIndex(4, count())
    old, new = prefix_keys(prompt(1, 2, 3), ROOT), prefix_keys(prompt(4, 5), ROOT)
    index.use(old)
    index.use(new)
    assert (index.match(old), index.match(new)) == (2, 2)


def test_a_use_that_came_to_nothing_leaves_what_others_shared() -> None:
    index = PrefixIndex(100, count())
    long, short = prefix_keys(prompt(1, 2, 3), ROOT), prefix_keys(prompt(1), ROOT)
    use = index.use(long)
    index.use(short)
    index.undo(long, use)
    assert (index.match(long), len(index)) == (1, 1)


def test_the_age_of_what_leaves_next_is_known_once_the_index_is_full() -> None:
    index = PrefixIndex(2, count(5))
    index.use(prefix_keys(prompt(1), ROOT))
    assert index.oldest_use() is None
    index.use(prefix_keys(prompt(2), ROOT))
    assert index.oldest_use() == 5


def test_an_engine_without_a_cache_has_an_empty_index() -> None:
    index = PrefixIndex(0, count())
    index.use(prefix_keys(prompt(1), ROOT))
    assert (len(index), index.oldest_use()) == (0, None)


def test_evicting_a_block_evicts_all_that_is_older() -> None:
    index = PrefixIndex(100, count())
    prompts = [prefix_keys(prompt(each, each + 1), ROOT) for each in (10, 20, 30)]
    uses = [index.use(keys) for keys in prompts]
    index.evict_until(uses[1])
    assert [index.match(keys) for keys in prompts] == [0, 0, 2]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=60), st.integers(1, 20), st.data())
def test_memory_is_bounded_and_what_is_known_is_a_prefix(
    prompts: list[list[int]], capacity: int, data: st.DataObject
) -> None:
    index = PrefixIndex(capacity, count())
    for blocks in prompts:
        keys = prefix_keys(prompt(*blocks), ROOT)
        known = index.match(keys)
        use = index.use(keys)
        if data.draw(st.booleans()):
            index.undo(keys[known:], use)
        elif data.draw(st.integers(0, 9)) == 0:
            index.evict_until(use - 2)
        assert len(index) <= capacity
        for other in prompts:
            chain = prefix_keys(prompt(*other), ROOT)
            found = [key in index._last_uses for key in chain]
            assert found == sorted(found, reverse=True), "a block is known whose start is not"
            assert index.match(chain) == sum(found)


def test_no_cache_however_large_makes_an_index_without_bound() -> None:
    assert PrefixIndex(1 << 40, count())._capacity == MAX_INDEXED_BLOCKS
