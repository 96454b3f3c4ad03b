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
