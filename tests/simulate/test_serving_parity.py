"""The simulator's policy and the controller's decision, asked about the same moment, buy and let go the same."""

from __future__ import annotations

from collections import Counter

from raytide.autoscaler.endpoints import targets
from raytide.autoscaler.endpoints.replica_placement import FleetNode, FleetPlan, FleetState
from raytide.control.reconcile.decide import decide
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad, Traffic
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.plan import Drain, Launch
from raytide.core.objects.snapshot import EndpointView, NodeView, Pool, Quote, Snapshot
from raytide.simulate.serving.compare import Scenario, simulate
from raytide.simulate.serving.fleet import SimulatedFleet
from raytide.simulate.serving.raytide import ONDEMAND, RaytidePolicy
from raytide.simulate.serving.setup import ServingSetup

START_S = 1_000_000.0
SOLID = NodeType(name="v100", resources={"GPU": 1}, price_micro_usd_h=3_060_000, zones=("od",), max_nodes=99)


class Watched(RaytidePolicy):
    """Asks the controller's decision before it does what its own plan says."""

    compared = launches = releases = 0

    def _act(self, fleet: SimulatedFleet) -> bool:
        state = self.state(fleet)
        if not any(node.is_ready for node in state.nodes):  # the controller replaces nothing while nobody answers
            return super()._act(fleet)
        plan, seen = state.plan(), self._snapshot(state, fleet)
        (view,) = targets.set_targets(seen)[0].endpoints
        actions = decide(seen).actions
        by_id = {node.id: node for node in state.nodes}
        assert view.endpoint.target_replicas == len(state.nodes) + len(plan.launch) - len(plan.release)
        assert view.pools == tuple(("v100", "od") if pool == ONDEMAND else ("spot", pool) for pool in plan.launch)
        if all(by_id[node_id].is_ready for node_id in plan.release):  # else what still starts is used first
            bought = Counter((a.node_type, a.zone) for a in actions if isinstance(a, Launch))
            drained = sorted(a.node_id for a in actions if isinstance(a, Drain))
            assert bought == Counter(view.pools)
            assert drained == sorted(f"node-{node_id}" for node_id in plan.release)
        self._count(plan)
        return super()._act(fleet)

    def _count(self, plan: FleetPlan) -> None:
        self.compared += 1
        self.launches += len(plan.launch)
        self.releases += len(plan.release)

    def _snapshot(self, state: FleetState, fleet: SimulatedFleet) -> Snapshot:
        """Returns what the live controller would see at this moment."""
        goal, now_s = self.model.goal, START_S + fleet.now_s
        spot = NodeType(
            name="spot",
            resources={"GPU": 1},
            market=CapacityType.SPOT,
            price_micro_usd_h=918_000,
            zones=tuple(goal.spot_usd_h),
            max_nodes=99,
        )
        replicas = Replicas(
            min=1, max=goal.max_replicas, slo_ttft_s=5.0, slo_target=0.99, cold_start_s=goal.cold_start_s
        )
        spec = ServeSpec(name="m", model="/m", resources={"GPU": 1}, replicas=replicas)
        ready = [f"ray-{node.id}" for node in state.nodes if node.is_ready]
        busy = {f"ray-{node.id}": float(node.busy) for node in state.nodes}
        said = tuple(ReplicaLoad(name, now_s, running=busy[name], node=name) for name in ready)
        load = EndpointLoad(now_s, 0.0, len(ready), tuple(ready), said, Traffic())
        endpoint = Endpoint(spec, "me", EndpointState.RUNNING, 0.0, len(state.nodes))
        zones = [pool for pool in state.pools.values() if pool.is_spot]
        return Snapshot(
            at_s=now_s,
            node_types=(SOLID, spot),
            nodes=tuple(_view(node, spot if node.is_spot else SOLID, now_s) for node in state.nodes),
            endpoints=(EndpointView(endpoint, load, state.replica_value),),
            pools=tuple(
                Pool("spot", z.name, 1, now_s + (0.0 if z.most else 60.0)) for z in zones if z.most is not None
            ),
            quotes=tuple(Quote("spot", z.name, None, z.losses_per_h) for z in zones),
            next_node=1 + len(fleet.launched),
        )


def _view(node: FleetNode, node_type: NodeType, now_s: float) -> NodeView:
    zone = node.pool or "od"
    state = NodeState.READY if node.is_ready else NodeState.LAUNCHING
    record = Node(
        f"node-{node.id}",
        node_type.name,
        zone,
        node_type.market,
        node_type.price_in(zone),
        state,
        now_s - 10.0,
        ready_at_s=now_s if node.is_ready else None,
        ray_node_id=f"ray-{node.id}" if node.is_ready else "",
        subject="m",
    )
    left = {"GPU": 0.0 if node.is_ready else 1.0}
    return NodeView(record, node_type.resources, left, node_type.all_labels(zone))


def test_the_controller_buys_and_lets_go_what_the_simulator_does(setup: ServingSetup) -> None:
    stage = Scenario.of(setup)
    policy = Watched(setup, stage.work, stage.zones, stage.usd_h)
    simulate(SimulatedFleet(setup, stage.work, stage.zones), policy)
    assert policy.compared > 400 and policy.launches > 20 and policy.releases > 5
