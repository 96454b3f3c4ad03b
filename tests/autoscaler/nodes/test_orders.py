"""Orders about nodes: drained, kept out of use, released; each once, whatever state the node is in."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.autoscaler.nodes.test_lifecycle import CPU4, READY

from raytide.autoscaler.disruption.termination import overdue_actions
from raytide.autoscaler.nodes import lifecycle
from raytide.autoscaler.nodes.orders import DRAIN_S, carry_out
from raytide.core.objects.node import Node, NodeState
from raytide.core.objects.plan import Drain, Terminate
from raytide.core.objects.snapshot import NodeView, Snapshot
from raytide.core.specs.order import Order, OrderKind

NOW = 1000.0


def view(node: Node, *, is_draining: bool = False) -> NodeView:
    return NodeView(node, {"CPU": 4.0}, {"CPU": 4.0}, {}, is_draining=is_draining)


def overdue(node: NodeView, at_s: float = NOW) -> list[Drain | Terminate]:
    return list(overdue_actions(Snapshot(at_s, (CPU4,), nodes=(node,))))


def order(kind: OrderKind, subject: str = "node-1") -> Order:
    return Order("order-1234", kind, subject, "", "ECC errors rise", "ana", NOW)


def test_a_quarantined_node_drains_and_its_machine_stays_until_it_is_released() -> None:
    nodes, (done,) = carry_out({"node-1": READY}, [order("quarantine_node")], NOW)
    kept = nodes["node-1"]
    assert (kept.state, kept.drain_deadline_s, kept.quarantined) == (
        NodeState.DRAINING,
        NOW + DRAIN_S,
        "ECC errors rise",
    )
    assert done.done_at_s == NOW
    (drain,) = overdue(view(kept))
    assert isinstance(drain, Drain)
    empty = view(kept, is_draining=True)
    assert overdue(empty) == []
    assert overdue(empty, NOW + DRAIN_S + 1) == []
    gone_from_ray = lifecycle.from_ray(kept, None, NOW + 1000)
    assert gone_from_ray.state is NodeState.DRAINING
    nodes, _ = carry_out({"node-1": kept}, [order("release_node")], NOW)
    assert (nodes["node-1"].state, nodes["node-1"].quarantined) == (NodeState.TERMINATING, "")


def test_a_replaced_node_drains_and_ends() -> None:
    nodes, _ = carry_out({"node-1": READY}, [order("replace_node")], NOW)
    (end,) = overdue(view(nodes["node-1"], is_draining=True))
    assert isinstance(end, Terminate)


def test_a_quarantined_node_is_not_replaced() -> None:
    nodes, _ = carry_out({"node-1": READY}, [order("quarantine_node")], NOW)
    after, (done,) = carry_out(nodes, [order("replace_node")], NOW + 1)
    assert after == nodes
    assert done.outcome == "node-1 is in quarantine already"


@given(
    st.lists(st.sampled_from(["quarantine_node", "replace_node", "release_node", "restart_replica"]), max_size=6),
    st.sampled_from(list(NodeState)),
)
def test_every_order_ends_and_no_node_comes_back(kinds: list[OrderKind], state: NodeState) -> None:
    before = {"node-1": replace(READY, state=state)}
    orders = [replace(order(kind), id=f"order-{number}") for number, kind in enumerate(kinds)]
    after, done = carry_out(before, [*orders, order("replace_node", "node-7")], NOW)
    assert len(done) == 1 + sum(kind != "restart_replica" for kind in kinds)
    assert all(each.outcome for each in done)
    order_of = list(NodeState)
    assert order_of.index(after["node-1"].state) >= order_of.index(state)
    again, _ = carry_out(after, orders, NOW)
    assert not (again["node-1"].quarantined and again["node-1"].state in (NodeState.TERMINATING, NodeState.READY))
