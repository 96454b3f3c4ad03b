"""Our own spot nodes show how available their pools are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytide.autoscaler.nodes import launch_backoff
from raytide.autoscaler.nodes.lifecycle import NEVER_JOINED, TAKEN_BACK, terminating
from raytide.autoscaler.spot.pool_availability import PAST_S, PoolAvailability
from raytide.autoscaler.spot.reclaim_hazard import STALE_S
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.objects.plan import Terminate

HOUR_S = 3600.0


def node(number: int, zone: str, ready_at_s: float | None, lost_at_s: float | None = None) -> Node:
    """One that joined, or was refused, and may have been taken back since."""
    state = NodeState.READY if lost_at_s is None else NodeState.GONE
    reason = TAKEN_BACK if lost_at_s is not None and ready_at_s is not None else "has none left"
    asked_s = (ready_at_s if ready_at_s is not None else lost_at_s or 0.0) - 60.0
    return Node(
        f"node-{number}", "v100.spot", zone, CapacityType.SPOT, 1, state, asked_s,
        ready_at_s=ready_at_s, ended_at_s=lost_at_s, reason=reason,
    )  # fmt: skip


A, B = "v100.spot/a", "v100.spot/b"


def test_a_pool_is_gone_from_a_loss_until_it_gives_a_node_again() -> None:
    watch = PoolAvailability()
    watch.observe([node(1, "a", 100.0)], 100.0)
    assert watch.forecast([A, B], 100.0).is_up == (True, True)
    lost = node(1, "a", 100.0, 4000.0)
    watch.observe([lost], 4000.0)
    seen = watch.forecast([A, B], 4000.0)
    assert (seen.is_up, seen.since_s) == ((False, True), (4000.0, 100.0))
    watch.observe([lost, node(2, "a", 4300.0)], 4300.0)
    seen = watch.forecast([A, B], 4300.0)
    assert (seen.is_up, seen.since_s[0]) == ((True, True), 4300.0)


def test_a_pool_that_goes_on_refusing_is_gone_and_one_that_nobody_asks_comes_back() -> None:
    watch = PoolAvailability()
    watch.observe([node(1, "a", None, 100.0)], 100.0)
    assert watch.forecast([A], 100.0).is_up == (False,)
    watch.observe([node(2, "a", None, 600.0)], 600.0)
    watch.observe([], 600.0 + STALE_S)
    assert watch.forecast([A], 600.0 + STALE_S).is_up == (False,)
    watch.observe([], 601.0 + STALE_S)
    assert watch.forecast([A], 601.0 + STALE_S).is_up == (True,)


def test_what_happened_before_the_first_question_is_learned_as_if_it_had_been_watched() -> None:
    nodes = [
        node(number, "a", HOUR_S * 6 * number + 300.0, HOUR_S * (6 * number + 5)) for number in range(20)
    ]  # five hours up, one gone
    late, live = PoolAvailability(), PoolAvailability()
    live.forecast([A], 0.0)
    for tick in range(20 * 6 * 12 + 1):
        now_s = tick * 300.0
        there = [
            n if (n.ended_at_s or 0.0) <= now_s else replace(n, state=NodeState.READY, reason="", ended_at_s=None)
            for n in nodes
            if (n.ready_at_s or 0.0) <= now_s
        ]
        live.observe(there, now_s)
    late.observe(nodes, now_s)
    replayed, watched = late.forecast([A], now_s), live.forecast([A], now_s)
    assert replayed.is_up == watched.is_up
    # Old spells go on: an hour of which the fifth is lost in a pool that lives for five.
    for band in range(5):
        assert replayed.lost[band] == pytest.approx(watched.lost[band], rel=0.3)
    assert replayed.found[1] == pytest.approx(watched.found[1], rel=0.3)


def test_our_own_end_of_a_node_that_is_coming_says_nothing_of_its_pool() -> None:
    coming = Node("node-1", "v100.spot", "a", CapacityType.SPOT, 1, NodeState.LAUNCHING, 40.0)
    ended = terminating(coming, Terminate("node-1", "the fleet costs too much"))
    late = terminating(coming, Terminate("node-1", f"{NEVER_JOINED} 600 s of its launch"))
    for one, is_up in ((ended, True), (late, False)):
        watch = PoolAvailability()
        watch.observe([one], 100.0)
        assert watch.forecast([A], 100.0).is_up == (is_up,)
    assert launch_backoff.update_pools((), [coming], [ended], 100.0) == ()
    assert launch_backoff.update_pools((), [coming], [late], 100.0)[0].failures == 1


def test_what_is_long_past_is_forgotten_once() -> None:
    watch, old = PoolAvailability(), node(1, "a", 100.0)
    watch.observe([old], 100.0)
    watch.forecast([A], 100.0)
    for tick in range(3):
        watch.observe([old], 200.0 + PAST_S + tick)
    assert watch == PoolAvailability()
    assert watch.forecast([A], 300.0 + PAST_S).is_up == (True,)
