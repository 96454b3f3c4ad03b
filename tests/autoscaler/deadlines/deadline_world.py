"""One job with a deadline on a whole cluster in memory, while spot zones come and go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tests.autoscaler.world import Cluster

from raytide.autoscaler.deadlines.jobs import with_market_constraints
from raytide.core.money import cumulative, to_us
from raytide.core.objects.gang import LeaseState, Shape
from raytide.core.objects.node import CapacityType, NodeType

TICK_S = 60.0
LAUNCH_S = 150.0
RESUME_S = 60.0
ZONES = ("a", "b")
SPOT = NodeType(
    name="v100.spot", resources={"GPU": 1.0}, market=CapacityType.SPOT, price_micro_usd_h=918_000, zones=ZONES,
    max_nodes=4, idle_timeout_s=30.0, busy_above={},
)  # fmt: skip
SOLID = SPOT.model_copy(
    update={"name": "v100", "market": CapacityType.ON_DEMAND, "price_micro_usd_h": 3_060_000, "zones": ("a",)}
)


@dataclass
class Story:
    """`up`: of each zone, whether it has nodes, tick by tick; the last holds on."""

    up: Sequence[Sequence[bool]]
    work_s: float
    slack_s: float
    reports: bool = True
    """True if the job reports how much is left; else it has an estimate only."""
    markets: set[tuple[CapacityType, ...] | None] = field(default_factory=set)
    """The markets that it was allowed to use."""

    def run(self) -> Story:
        """To the job's end."""
        self.cluster = Cluster((SPOT, SOLID), launch_delay_s=LAUNCH_S)
        self.began_s = self.cluster.clock.now_s()
        self.due_s = self.began_s + self.work_s + self.slack_s
        deadline, estimate_h = datetime.fromtimestamp(self.due_s, UTC), self.work_s / 3600.0
        self.job_id = self.cluster.submit(
            Shape(resources={"GPU": 1.0}), deadline=deadline, estimate_h=estimate_h, preemptible=True
        )
        done_s, resuming_s, tick = 0.0, RESUME_S, 0
        while done_s < self.work_s:
            if self._is_active():
                done_s += max(0.0, TICK_S - resuming_s)
                resuming_s = max(0.0, resuming_s - TICK_S)
            else:
                resuming_s = RESUME_S
            if done_s and self.reports:
                self._report(self.work_s - done_s)
            if done_s < self.work_s:
                self._open_or_close(tick)
                self.cluster.tick(TICK_S)
                self.markets.update(
                    stance.markets for stance in with_market_constraints(self.cluster.seen).stances.values()
                )
            tick += 1
        self.ended_s = self.cluster.clock.now_s()
        return self

    @property
    def late_s(self) -> float:
        return max(0.0, self.ended_s - self.due_s)

    @property
    def cost(self) -> float:
        """In costs of the whole job on demand, a start included, to the end of its work."""
        paid = sum(
            cumulative(m.price_micro_usd_h, to_us(m.started_at_s), to_us(m.ended_at_s or self.ended_s))
            for m in self.cluster.provider.machines()
        )
        return paid / (SOLID.price_micro_usd_h * (self.work_s + LAUNCH_S + RESUME_S + 2 * TICK_S) / 3600.0)

    def _is_active(self) -> bool:
        return any(lease.state is LeaseState.ACTIVE for lease in self.cluster.book.leases.values())

    def _report(self, left_s: float) -> None:
        job = self.cluster.book.jobs[self.job_id]
        self.cluster.book.jobs[self.job_id] = replace(job, progress={"left_s": left_s})

    def _open_or_close(self, tick: int) -> None:
        for zone, up in zip(ZONES, self.up, strict=True):
            is_up = up[min(tick, len(up) - 1)]
            self.cluster.provider.set_stock(SPOT.name, zone, None if is_up else 0)
            for machine in self.cluster.machines():
                if not is_up and (machine.node_type, machine.zone) == (SPOT.name, zone):
                    self.cluster.provider.reclaim(machine.node_id)


def spells(seed: int, ticks: int, up_h: float, gone_h: float) -> list[bool]:
    """A zone that is there for so long on average, and gone for so long."""
    chance = random.Random(seed)
    found: list[bool] = []
    is_up = chance.random() < up_h / (up_h + gone_h)
    while len(found) < ticks:
        found += [is_up] * max(1, round(chance.expovariate(1.0 / (up_h if is_up else gone_h)) * 3600.0 / TICK_S))
        is_up = not is_up
    return found
