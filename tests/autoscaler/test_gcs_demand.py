"""Ray's messages mean demand, however odd they are; read without a Ray."""

from __future__ import annotations

import pytest

from raytide.autoscaler.planner import plan
from raytide.autoscaler.ray_gcs import GcsReader
from raytide.core.objects.node import NodeType
from raytide.core.objects.plan import Launch
from raytide.core.objects.snapshot import Demand, Snapshot
from raytide.core.ray_internals import autoscaler_messages


@pytest.mark.parametrize("odd", [-1.0, float("nan"), float("inf"), 1e-320])
def test_an_amount_that_is_none_keeps_nobody_from_a_node(odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray checks nothing of what `request_resources` is told."""
    state = autoscaler_messages().ClusterResourceState()
    request = state.cluster_resource_constraints.add().resource_requests.add(count=1).request
    request.resources_bundle.update({"CPU": 1.0, "GPU": odd})
    state.pending_resource_requests.add(count=1).request.resources_bundle.update({"CPU": 4.0})
    monkeypatch.setattr(GcsReader, "_state", lambda self: state)
    work, _ = demand = GcsReader("").demand()
    assert work == Demand({"CPU": 4.0})
    cpu4 = NodeType(name="cpu4", resources={"CPU": 4}, price_micro_usd_h=1, max_nodes=2)
    assert [type(a) for a in plan(Snapshot(0.0, (cpu4,), demand=demand))][:1] == [Launch]


def test_only_the_resources_of_placement_groups_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resource that an operator calls `node_group_west` is one like any other."""
    of_group = {"CPU_group_" + 36 * "a": 1.0, "bundle_group_0_" + 36 * "0": 1000.0}
    own = {"CPU": 4.0, "node_group_west": 1.0}
    state = autoscaler_messages().ClusterResourceState()
    node = state.node_states.add(instance_id="node-1")
    node.total_resources.update({**own, **of_group, "node:10.0.0.1": 1.0})
    node.available_resources.update({**own, **of_group})
    state.pending_resource_requests.add(count=1).request.resources_bundle.update({"node_group_west": 1.0})
    state.pending_resource_requests.add(count=1).request.resources_bundle.update(of_group)
    monkeypatch.setattr(GcsReader, "_state", lambda self: state)
    (seen,) = GcsReader("").nodes()
    assert (seen.total, seen.available) == (own, own)
    assert GcsReader("").demand() == (Demand({"node_group_west": 1.0}),)
