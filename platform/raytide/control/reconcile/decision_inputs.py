"""What the controller knows beside the fleet: how often pools take nodes back, what may be spent, what replicas are
worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from raytide.autoscaler.deadlines.jobs import spot_forecasts
from raytide.autoscaler.endpoints.slo_controller import SavedModels, SloController
from raytide.autoscaler.nodes.spend_limits import limits
from raytide.autoscaler.spot.pool_availability import PoolAvailability
from raytide.autoscaler.spot.pool_risk import PoolRisk
from raytide.core.money import month_of, to_us
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.objects.node import Node
from raytide.core.objects.snapshot import Limits, Snapshot, SpotForecast
from raytide.core.state import Store
from raytide.ledger.cost import accrued

SPEND_PERIOD_S = 60.0
"""How often the month's spending is summed."""
_PAST_NODES = 1000
"""The newest nodes, from which the risk and the past of spot are learned; older ones tell little of today's market."""


class DecisionInputs:
    """Kept from tick to tick; a new controller learns it anew from the records of nodes."""

    def __init__(self, store: Store, config: ClusterConfig, now_s: float, known: SavedModels | None = None) -> None:
        """`known`: what an earlier controller learned of endpoints with an SLO."""
        self._store, self._books, self._config = store, store.books, config
        self._risk, self.fleets = PoolRisk(), SloController(known)
        self._risk.replay(store.nodes(limit=_PAST_NODES), now_s)
        self._spot: PoolAvailability | None = None
        self._spent_micro_usd = 0
        self._summed_at_s: float | None = None

    def on(self, seen: Snapshot, nodes: Iterable[Node], prices: Mapping[tuple[str, str], int]) -> Snapshot:
        """The snapshot with it. `nodes`: those that ended since the last tick included."""
        nodes = tuple(nodes)
        self._risk.observe(nodes, seen.at_s)
        quotes = self._risk.quotes(seen.node_types, prices, seen.at_s)
        spot, limits = self._watched(seen, nodes), self._limits(seen.at_s)
        return self.fleets.with_replica_values(
            replace(seen, quotes=quotes, spot=spot, limits=limits), self._risk.hazard
        )

    def _watched(self, seen: Snapshot, nodes: Iterable[Node]) -> tuple[SpotForecast, ...]:
        """What jobs with a deadline have to know of spot. The past is read when the first of them comes."""
        if self._spot is None:
            if all(job.spec.deadline is None for job in seen.jobs):
                return ()
            self._spot = PoolAvailability()
            self._spot.observe(self._store.nodes(limit=_PAST_NODES), seen.at_s)
        self._spot.observe(nodes, seen.at_s)
        return spot_forecasts(self._spot, seen)

    def _limits(self, now_s: float) -> Limits:
        section = self._config.settings.limits
        is_due = self._summed_at_s is None or now_s - self._summed_at_s >= SPEND_PERIOD_S
        if section.month_usd is not None and is_due:
            booked = self._books.spent([], month_of(to_us(now_s))).teams_month
            running = accrued(self._books.intervals(), to_us(now_s))
            self._spent_micro_usd = sum(booked.values()) + sum(entry.amount_micro_usd for entry in running)
            self._summed_at_s = now_s
        return limits(section, self._spent_micro_usd, now_s)
