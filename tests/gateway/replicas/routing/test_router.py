"""A request's replica is chosen by what is cached where and by load, alike in every gateway."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.gateway.replicas.routing.prefix_index import BLOCK_TOKENS, join_keys
from raytide.gateway.replicas.routing.router import MAX_SESSIONS, ReplicaState, Route, Router

CACHE = 1 << 16
NAMES = ("a", "b", "c")


def replicas(**changed: ReplicaState) -> list[ReplicaState]:
    return [changed.get(name) or ReplicaState(name, cache_tokens=CACHE) for name in NAMES]


def prompt(*blocks: int) -> list[int]:
    return [block for block in blocks for _ in range(BLOCK_TOKENS)]


def finished(route: Route, tokens: list[int], cached: int | None = None) -> str:
    route.first_token()
    route.end(cached_tokens=cached, tokens=tokens)
    return route.replica


def test_a_prompt_goes_where_its_start_is_cached() -> None:
    router, homes = Router(), {}
    for start in range(30):
        homes[start] = finished(router.route(prompt(start, 1, 2, 3), replicas()), prompt(start, 1, 2, 3))
    assert set(homes.values()) == set(NAMES)
    for start, home in homes.items():
        route = router.route(prompt(start, 1, 2, 3, 4), replicas())
        assert (route.replica, route.cached_tokens) == (home, 4 * BLOCK_TOKENS)
        finished(route, [])


def test_an_answer_is_cached_too() -> None:
    router = Router()
    home = finished(router.route(prompt(1), replicas()), prompt(1, 2, 3))
    route = router.route(prompt(1, 2, 3, 4), replicas())
    assert (route.replica, route.cached_tokens) == (home, 3 * BLOCK_TOKENS)


def test_adapters_and_salts_have_caches_of_their_own() -> None:
    router = Router()
    finished(router.route(prompt(1, 2), replicas()), [])
    assert router.route(prompt(1, 2), replicas(), lora="x").cached_tokens == 0
    assert router.route(prompt(1, 2), replicas(), cache_salt="x").cached_tokens == 0
    assert router.route(prompt(1, 2), replicas()).cached_tokens == 2 * BLOCK_TOKENS


def test_a_hot_prefix_spreads() -> None:
    router = Router()
    finished(router.route(prompt(*range(8)), replicas()), [])
    routes = [router.route(prompt(*range(8), 100 + at), replicas()) for at in range(120)]
    counts = Counter(route.replica for route in routes)
    assert min(counts[name] for name in NAMES) >= 20


def test_equal_prompts_in_flight_spread() -> None:
    router = Router()
    counts = Counter(router.route(prompt(1, 2, 3), replicas()).replica for _ in range(90))
    assert max(counts.values()) - min(counts[name] for name in NAMES) <= 6


def test_a_busy_replica_gets_less_even_if_others_made_it_busy() -> None:
    router = Router()
    busy = ReplicaState("a", running=8, waiting=6, cache_tokens=CACHE)
    counts = Counter(router.route(prompt(*range(at, at + 4)), replicas(a=busy)).replica for at in range(0, 40, 4))
    assert counts["a"] == 0


def test_the_tokens_that_others_have_sent_are_work_in_front_and_own_ones_count_once() -> None:
    router = Router()
    own = router.route(prompt(*range(1000, 1040)), replicas()[:1])
    assert own.replica == "a"
    router.route(prompt(1), replicas()[1:]).end()
    router.add_report("a", own.new_tokens)
    own.first_token()
    routes = [router.route(prompt(*range(at, at + 4)), replicas()) for at in range(2000, 2400, 4)]
    assert Counter(route.replica for route in routes)["a"] > 20
    for route in routes:
        route.end()
    router.add_report("a", 100_000)
    counts = Counter(router.route(prompt(*range(at, at + 4)), replicas()).replica for at in range(0, 40, 4))
    assert counts["a"] == 0


def test_requests_that_are_late_anyway_are_no_work_in_front_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that joins an overloaded one gets half of the requests from then on, not all until both have waited as
    many."""
    router, now_s = Router(), 100.0
    router.slo_ttft_s = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    old, both = replicas()[:1], replicas()[:2]
    late = [router.route(prompt(number), old) for number in range(100)]
    now_s += 6.0
    routes = [router.route(prompt(1000 + number), both) for number in range(40)]
    to_old = sum(route.replica == old[0].name for route in routes)
    assert 10 <= to_old <= 30
    for route in (*late, *routes):
        route.end()
    now_s += 14.0
    further = [router.route(prompt(2000 + number), both) for number in range(40)]
    assert 10 <= sum(route.replica == old[0].name for route in further) <= 30


def test_what_all_prompts_begin_with_does_not_gather_them_where_the_cache_is_full() -> None:
    router, small = Router(), [ReplicaState(name, cache_tokens=1 << 12) for name in NAMES]
    homes = Counter(
        finished(router.route(prompt(*range(4), *range(100 * at, 100 * at + 20)), small), []) for at in range(1, 200)
    )
    assert min(homes[name] for name in NAMES) >= 40


def test_a_replica_without_free_kv_blocks_waits_for_others() -> None:
    router = Router()
    full = [ReplicaState(name, cache_tokens=CACHE, free_kv_tokens=0) for name in "ab"]
    free = ReplicaState("c", running=3, cache_tokens=CACHE, free_kv_tokens=4096)
    assert {router.route(prompt(at, at + 1), [*full, free]).replica for at in range(5)} == {"c"}


def test_gateways_that_know_nothing_of_each_other_agree_on_a_new_prefix() -> None:
    one, other = Router(), Router()
    for at in range(50):
        first, second = (router.route(prompt(at, 1, 2, 3), replicas()) for router in (one, other))
        assert first.replica == second.replica
        finished(first, [])
        finished(second, [])


def test_a_gateway_learns_from_a_replica_what_another_sent_there() -> None:
    one, other = Router(), Router()
    finished(other.route(prompt(99), replicas()), [])
    route = one.route(prompt(1, 2, 3), replicas())
    elsewhere = next(name for name in NAMES if name != route.replica)
    other.add_prefix(elsewhere, join_keys(route.keys))
    assert other.route(prompt(1, 2, 3, 4), replicas()).replica == elsewhere


def test_a_session_stays_although_its_prompts_share_nothing() -> None:
    router = Router()
    homes = {
        session: {
            finished(router.route(prompt(100 * ord(session) + turn), replicas(), session=session), [])
            for turn in range(10)
        }
        for session in "abcdefghijkl"
    }
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 3


def test_a_session_leaves_a_replica_that_is_overloaded() -> None:
    router = Router()
    home = finished(router.route(prompt(1), replicas(), session="s"), [])
    busy = ReplicaState(home, running=64, waiting=20, cache_tokens=CACHE)
    assert router.route(prompt(2), replicas(**{home: busy}), session="s").replica != home


def test_sessions_are_bounded() -> None:
    router = Router()
    router._sessions.update({b"%d" % at: "a" for at in range(MAX_SESSIONS)})
    finished(router.route(prompt(1), replicas(), session="s"), [])
    assert len(router._sessions) == MAX_SESSIONS


def test_a_prefix_that_was_not_found_has_left_with_all_that_is_older() -> None:
    router, one = Router(), [ReplicaState("a", cache_tokens=CACHE)]
    for start in (1, 2, 3):
        finished(router.route(prompt(start, start), one), [])
    finished(router.route(prompt(2, 2, 9), one), prompt(2, 2, 9), cached=0)
    found = [router.route(prompt(start, start), one).cached_tokens // BLOCK_TOKENS for start in (1, 2, 3)]
    assert found == [0, 2, 2]


def test_what_is_still_being_computed_proves_nothing_when_it_is_not_found() -> None:
    router, one = Router(), [ReplicaState("a", cache_tokens=CACHE)]
    finished(router.route(prompt(1, 1), one), [])
    computing = router.route(prompt(2, 2), one)
    finished(router.route(prompt(2, 2, 9), one), prompt(2, 2, 9), cached=0)
    finished(computing, [])
    assert router.route(prompt(1, 1), one).cached_tokens == 2 * BLOCK_TOKENS


def test_an_engine_with_larger_blocks_finds_whole_ones_only() -> None:
    router, one = Router(), [ReplicaState("a", cache_tokens=CACHE, block_tokens=4 * BLOCK_TOKENS)]
    finished(router.route(prompt(0, 0), one), [])
    finished(router.route(prompt(*range(1, 8)), one), [])
    finished(router.route(prompt(*range(1, 9)), one), prompt(*range(1, 9)), cached=4 * BLOCK_TOKENS)
    assert router.route(prompt(0, 0), one).cached_tokens == 2 * BLOCK_TOKENS


def test_a_request_that_ended_before_its_first_token_left_nothing() -> None:
    router = Router()
    router.route(prompt(1, 2), replicas()).end()
    assert router.route(prompt(1, 2), replicas()).cached_tokens == 0


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_a_request_counts_once_however_often_it_ends(ends: int) -> None:
    router, one = Router(), [ReplicaState("a", cache_tokens=CACHE)]
    route = router.route(prompt(1), one)
    for _ in range(ends):
        route.first_token()
        route.end()
    assigned = router._assigned["a"]
    assert (len(assigned.unanswered), len(assigned.in_flight)) == ((0, 0) if ends else (1, 1))
    assert assigned.pending_tokens == (0 if ends else BLOCK_TOKENS)


def test_a_lost_replica_is_forgotten() -> None:
    router = Router()
    home = finished(router.route(prompt(1, 2, 3), replicas()), [])
    router.forget(home)
    assert router.route(prompt(1, 2, 3), replicas()).cached_tokens == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 40), st.sampled_from(["", "s", "t"])), min_size=1, max_size=150
    ),
    st.integers(2, 6),
    st.data(),
)
def test_no_replica_has_much_more_in_front_of_it_than_a_request_would_cost_elsewhere(
    asked: list[tuple[int, int, str]], count: int, data: st.DataObject
) -> None:
    """Pending tokens differ by at most what makes moving worthwhile: the longest prompt, computed at its weight."""
    router, running = Router(), list[Route]()
    some = [ReplicaState(f"{at}", cache_tokens=CACHE) for at in range(count)]
    longest = 0
    for start, length, session in asked:
        tokens = prompt(*range(start, start + length))
        longest = max(longest, len(tokens))
        running.append(router.route(tokens, some, session=session))
        if data.draw(st.integers(0, 4)) == 0:
            running.pop(data.draw(st.integers(0, len(running) - 1))).end()
        pending = [router._assigned[each.name].pending_tokens for each in some]
        held = [len(router._assigned[each.name].unanswered) for each in some]
        if len(running) == len(asked):  # nothing has ended: what is left is the router's own choice
            assert max(pending) - min(pending) <= 5 * longest + 512
            assert max(held) <= len(running)
    for route in running:
        route.end()
    for each in some:
        assigned = router._assigned[each.name]
        assert (assigned.pending_tokens, len(assigned.in_flight), len(assigned.unanswered)) == (0, 0, 0)


def test_where_all_have_queues_a_longer_one_is_worth_the_cache() -> None:
    def moves(waiting: int) -> bool:
        router = Router()
        home = finished(router.route(prompt(*range(20)), replicas()), [])
        counts = {name: waiting + (6 if name == home else 0) for name in NAMES}
        for each in replicas():
            router.route(prompt(1), [each]).end()  # it is known now
            router.add_report(each.name, 256 * counts[each.name])
        states = [ReplicaState(name, waiting=counts[name], cache_tokens=CACHE) for name in NAMES]
        return router.route(prompt(*range(20), 99), states).replica != home

    assert moves(0)
    assert not moves(20)
