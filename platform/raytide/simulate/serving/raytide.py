"""raytide's serving policy in the simulator: the production plan, with the same inputs as in a live controller."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from raytide.autoscaler.endpoints.queue_simulator import ReplicaSpeed, RequestBatch
from raytide.autoscaler.endpoints.replica_placement import FleetNode, FleetState, ReplicaPool
from raytide.autoscaler.endpoints.replica_value import SETTLE_S, IntervalStats, ReplicaValueModel, ServingGoal
from raytide.autoscaler.spot.reclaim_hazard import ReclaimHazard
from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.fleet import SimulatedFleet
from raytide.simulate.serving.requests import Workload
from raytide.simulate.serving.router import SimulatedReplica
from raytide.simulate.serving.setup import ServingSetup
from raytide.simulate.serving.spot_zones import SpotZones
from raytide.simulate.serving.zone_backoff import ZoneBackoff

ONDEMAND = ""
"""The name of the on-demand pool, which is never reclaimed and never empty."""

_ROUNDS = 12
"""The most decisions in a tick; after a spot launch, refused or not, another decision follows."""


@dataclass(slots=True)
class _Progress:
    at_s: float = 0.0
    arrived: int = 0
    judged: int = 0
    served: int = 0
    lost: int = 0


class RaytidePolicy:
    def __init__(self, setup: ServingSetup, work: Workload, zones: SpotZones, usd_h: dict[CapacityType, float]) -> None:
        speed = ReplicaSpeed(setup.prefill_tps, setup.slots, setup.tpot_ms / 1000.0)
        self.model = ReplicaValueModel.from_goal(
            ServingGoal(
                slo_ttft_s=setup.slo_ttft_s,
                slo_target=setup.slo_target,
                min_replicas=1,
                max_replicas=setup.max_replicas,
                cold_start_s=setup.cold_start_s,
                speed=speed,
                ondemand_usd_h=usd_h[CapacityType.ON_DEMAND],
                spot_usd_h=dict.fromkeys(zones.names, usd_h[CapacityType.SPOT]),
            )
        )
        self.hazard, self.backoff = ReclaimHazard(), ZoneBackoff()
        self._zones = zones
        self._slo_ttft_s = setup.slo_ttft_s
        self._work = work
        self._seen = _Progress()

    def tick(self, fleet: SimulatedFleet) -> None:
        self._learn(fleet)
        for _ in range(_ROUNDS):
            if not self._act(fleet):
                break

    def state(self, fleet: SimulatedFleet) -> FleetState:
        """Returns the inputs of the production plan."""
        goal = self.model.goal
        pools = {
            zone: ReplicaPool(
                zone,
                usd_h,
                is_spot=True,
                losses_per_h=self.hazard.per_h(zone, fleet.now_s),
                most=self.backoff.max_launches(zone, fleet.now_s),
            )
            for zone, usd_h in goal.spot_usd_h.items()
        }
        pools[ONDEMAND] = ReplicaPool(ONDEMAND, goal.ondemand_usd_h, is_spot=False)
        return FleetState(self.model.value(self.hazard), pools, self._nodes(fleet), goal.cold_start_s)

    def _act(self, fleet: SimulatedFleet) -> bool:
        """Applies a plan. Returns True if another decision is needed."""
        decided = self.state(fleet).plan()
        by_id = {str(replica.number): replica for replica in fleet.alive}
        for node_id in decided.release:
            fleet.release(by_id[node_id])
        refused: set[str] = set()
        for pool in decided.launch:
            if pool == ONDEMAND:
                fleet.launch_ondemand()
            elif pool not in refused and fleet.launch_spot(self._zones.names.index(pool)) is None:
                refused.add(pool)
            elif pool not in refused:
                self.backoff.on_launched(pool)
        for zone in refused:
            self.backoff.on_refused(zone, fleet.now_s)
        return any(pool != ONDEMAND for pool in decided.launch)

    def _nodes(self, fleet: SimulatedFleet) -> list[FleetNode]:
        staying = [replica for replica in fleet.alive if not replica.is_leaving]
        return [
            FleetNode(str(r.number), self._zone(r), r.zone is not None, fleet.is_ready(r), fleet.busy(r))
            for r in staying
        ]

    def _zone(self, replica: SimulatedReplica) -> str:
        return ONDEMAND if replica.zone is None else self._zones.names[replica.zone]

    def _learn(self, fleet: SimulatedFleet) -> None:
        seen, now_s, arrival_s = self._seen, fleet.now_s, self._work.arrival_s
        judged, served = np.searchsorted(arrival_s, (now_s - self._slo_ttft_s, now_s - SETTLE_S), side="right")
        settled = slice(seen.served, int(served))
        late = range(seen.judged, int(judged))
        nodes = self._nodes(fleet)
        stats = IntervalStats(
            at_s=now_s,
            dt_s=now_s - seen.at_s,
            requests=fleet.arrived - seen.arrived,
            missed=sum(fleet.first_token_s[i] - arrival_s[i] > self._slo_ttft_s for i in late),
            settled=RequestBatch(
                max(seen.at_s - SETTLE_S, 0.0),
                max(now_s - SETTLE_S, 0.0),
                arrival_s[settled],
                self._work.prompt_tokens[settled],
                self._work.output_tokens[settled],
            ),
            held=Counter(node.pool for node in nodes if node.is_spot),
            ready=sum(node.is_ready for node in nodes),
        )
        lost = Counter(self._zone(replica) for replica in fleet.lost_nodes[seen.lost :])
        self.hazard.observe(stats.held, lost, now_s, stats.dt_s)
        for zone in lost:
            self.backoff.on_reclaimed(zone, now_s)
        self.model.learn(stats, self.hazard)
        self._seen = _Progress(now_s, fleet.arrived, int(judged), int(served), len(fleet.lost_nodes))
