"""The life of a node: what was seen moves it forward, and nothing is concluded from silence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytide.autoscaler.nodes import launch_backoff, lifecycle
from raytide.autoscaler.nodes.lifecycle import RAY_GRACE_S, from_provider, from_ray, observe, overdue
from raytide.autoscaler.providers.base import Machine, Notice
from raytide.autoscaler.ray_gcs import RayNode
from raytide.core.objects.node import Node, NodeState, NodeType
from raytide.core.objects.plan import Drain, Launch, Terminate
from raytide.core.objects.snapshot import Pool

CPU4 = NodeType(name="cpu4", resources={"CPU": 4}, price_micro_usd_h=200_000)
ASKED = lifecycle.requested(Launch("node-1", "cpu4", "a", "lease-1", "why"), CPU4, 100.0)
MACHINE = Machine("node-1", "cpu4", "a", 150_000, started_at_s=101.0)
ENDED = replace(MACHINE, ended_at_s=150.0, reason="reclaimed")
IN_RAY = RayNode("abc", "node-1", address="127.0.9.2")
READY = replace(ASKED, state=NodeState.READY, started_at_s=101.0, ready_at_s=110.0, ray_node_id="abc")
NOTICE = Notice("node-1", deadline_s=200.0)


def advance(node: Node, machine: Machine | None, in_ray: RayNode | None, notice: Notice | None, now_s: float) -> Node:
    """One node after one look at the provider and at Ray, both of which answered."""
    return from_ray(from_provider(node, machine, notice, now_s), in_ray, now_s)


def test_a_request_carries_what_was_decided() -> None:
    assert (ASKED.state, ASKED.subject, ASKED.reason) == (NodeState.REQUESTED, "lease-1", "why")
    assert (ASKED.price_micro_usd_h, ASKED.requested_at_s) == (200_000, 100.0)


def test_it_is_launching_when_the_provider_lists_it_at_the_price_that_it_bills() -> None:
    node = advance(ASKED, MACHINE, None, None, 102.0)
    assert (node.state, node.started_at_s, node.price_micro_usd_h) == (NodeState.LAUNCHING, 101.0, 150_000)
    assert advance(ASKED, None, None, None, 102.0) == ASKED


def test_it_is_ready_when_ray_lists_it_alive() -> None:
    node = advance(ASKED, MACHINE, IN_RAY, None, 110.0)
    assert (node.state, node.ready_at_s, node.ray_node_id) == (NodeState.READY, 110.0, "abc")
    assert node.address == "127.0.9.2"


def test_a_notice_drains_it_at_once_and_the_earlier_deadline_holds() -> None:
    node = advance(READY, MACHINE, IN_RAY, NOTICE, 120.0)
    assert (node.state, node.drain_deadline_s) == (NodeState.DRAINING, 200.0)
    assert advance(node, MACHINE, IN_RAY, Notice("node-1", 180.0), 121.0).drain_deadline_s == 180.0
    assert advance(node, MACHINE, IN_RAY, Notice("node-1", 300.0), 121.0).drain_deadline_s == 200.0


def test_a_notice_before_it_joined_ends_it() -> None:
    launching = replace(ASKED, state=NodeState.LAUNCHING)
    assert advance(launching, MACHINE, None, NOTICE, 105.0).state is NodeState.TERMINATING


def test_ray_s_own_word_that_it_drains_is_recorded_after_a_crash() -> None:
    drained = advance(READY, MACHINE, replace(IN_RAY, is_draining=True), None, 120.0)
    assert drained.state is NodeState.DRAINING
    assert drained.drain_deadline_s == 120.0 + lifecycle.DRAINED_BY_OTHERS_S, "what stays on it does not stay for ever"


def test_a_drained_node_whose_raylet_left_is_ended_at_once() -> None:
    node = replace(READY, state=NodeState.DRAINING, reason="idle")
    assert advance(node, MACHINE, replace(IN_RAY, is_alive=False), None, 120.0).state is NodeState.TERMINATING


def test_a_machine_without_its_ray_node_gets_a_grace() -> None:
    lost = advance(READY, MACHINE, None, None, 120.0)
    assert (lost.state, lost.lost_at_s) == (NodeState.READY, 120.0)
    assert advance(lost, MACHINE, None, None, 120.0 + RAY_GRACE_S).state is NodeState.READY
    assert advance(lost, MACHINE, None, None, 121.0 + RAY_GRACE_S).state is NodeState.TERMINATING
    assert advance(lost, MACHINE, IN_RAY, None, 125.0).lost_at_s is None


@pytest.mark.parametrize("state", [s for s in NodeState if s is not NodeState.GONE])
def test_it_is_gone_when_the_provider_ended_it_and_billed_until_then(state: NodeState) -> None:
    node = advance(replace(READY, state=state), ENDED, IN_RAY, None, 160.0)
    assert (node.state, node.ended_at_s) == (NodeState.GONE, 150.0)
    is_asked = state in (NodeState.DRAINING, NodeState.TERMINATING)
    assert node.reason == (READY.reason if is_asked else f"{lifecycle.ENDED_BY_PROVIDER}: reclaimed")
    assert advance(node, MACHINE, IN_RAY, NOTICE, 170.0) == node


def test_one_that_was_ended_before_it_was_bought_is_gone() -> None:
    node = lifecycle.terminating(ASKED, Terminate("node-1", "too late"))
    assert advance(node, None, None, None, 130.0).state is NodeState.GONE


def test_silence_of_either_side_moves_nothing() -> None:
    assert observe([READY], None, None, [], 999.0) == (READY,)
    assert observe([READY], [MACHINE], None, [], 999.0)[0].lost_at_s is None
    assert observe([READY], None, [IN_RAY], [], 999.0)[0].state is NodeState.READY


def test_the_living_ray_node_of_a_machine_counts() -> None:
    old = replace(IN_RAY, ray_node_id="zzz", is_alive=False)
    assert observe([READY], [MACHINE], [IN_RAY, old], [], 120.0)[0].ray_node_id == "abc"


def test_what_was_decided_and_not_done_is_due_again() -> None:
    ending = replace(READY, id="node-2", state=NodeState.TERMINATING)
    gone = replace(READY, id="node-3", state=NodeState.GONE)
    machines = [replace(MACHINE, node_id=f"node-{n}") for n in (2, 3, 4)]
    due = overdue([ASKED, ending, gone], machines)
    assert due.launch == (ASKED,)
    assert due.terminate == ("node-2", "node-3", "node-4")
    done = overdue([replace(ASKED, state=NodeState.LAUNCHING), ending], [MACHINE, replace(ENDED, node_id="node-2")])
    assert done == lifecycle.Overdue()


def test_an_accepted_idle_drain_is_recorded_on_a_ready_node_only() -> None:
    drain = Drain("node-1", "idle", 150.0, "idle for 60 s")
    assert lifecycle.drained(READY, drain).state is NodeState.DRAINING
    assert lifecycle.drained(READY, drain).drain_deadline_s is None
    assert lifecycle.drained(replace(READY, state=NodeState.TERMINATING), drain).state is NodeState.TERMINATING


def test_a_pool_rests_twice_as_long_after_each_failure_up_to_half_an_hour() -> None:
    pool, rests = Pool("cpu4", "a"), []
    for _ in range(9):
        pool = launch_backoff.after_failure(pool, 0.0, "none")
        rests.append(pool.retry_at_s)
    assert rests == [30, 60, 120, 240, 480, 960, 1800, 1800, 1800]


def _moved(node: Node, state: NodeState, pool: Pool | None = None, now_s: float = 120.0) -> Pool:
    (after,) = launch_backoff.update_pools(
        (pool,) if pool else (), [node], [replace(node, state=state, reason="none")], now_s
    )
    return after


def test_a_node_that_never_joined_is_a_failure_of_its_pool_and_one_that_joined_a_success() -> None:
    failed = _moved(ASKED, NodeState.GONE)
    assert (failed.failures, failed.retry_at_s, failed.reason) == (1, 150.0, "none")
    later = replace(ASKED, requested_at_s=151.0)
    assert _moved(later, NodeState.READY, failed, 160.0) == Pool("cpu4", "a")


def test_a_node_that_was_asked_for_before_the_failure_does_not_make_up_for_it() -> None:
    failed = _moved(ASKED, NodeState.TERMINATING)
    assert _moved(ASKED, NodeState.READY, failed, 125.0) == failed


def test_the_end_of_a_node_that_had_joined_is_no_failure() -> None:
    assert launch_backoff.update_pools((), [READY], [replace(READY, state=NodeState.GONE)], 130.0) == ()
