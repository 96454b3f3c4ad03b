"""Completes the Snapshot with inputs that the stored records do not contain: spot risk, spending limits, and the value
of replicas.
"""

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
from raytide.ledger.report import accrued

SPEND_PERIOD_S = 60.0
"""The interval of summing the month's spending, in seconds."""
_PAST_NODES = 1000
"""The number of newest nodes from which spot risk is learned; older ones say little about today's market."""


class DecisionInputs:
    """Computes those inputs of a decision that are not stored records. Keeps learned values from tick to tick.

    A new controller learns spot risk again from the records of nodes. The values that an earlier controller learned
    about endpoints with an SLO are passed to the constructor.
    """

    def __init__(self, store: Store, config: ClusterConfig, now_s: float, known: SavedModels | None = None) -> None:
        """`known` holds the data about endpoints with an SLO that an earlier controller learned."""
        self._store, self._books, self._config = store, store.books, config
        self._risk, self.fleets = PoolRisk(), SloController(known)
        self._risk.replay(store.nodes(limit=_PAST_NODES), now_s)
        self._spot: PoolAvailability | None = None
        self._spent_micro_usd = 0
        self._summed: tuple[str, float] | None = None
        """The month of the sum, and the time at which it was made."""

    def add_to(self, snapshot: Snapshot, nodes: Iterable[Node], prices: Mapping[tuple[str, str], int]) -> Snapshot:
        """Returns the snapshot with spot quotes, spot forecasts, limits and replica values added. `nodes` must include
        the nodes that have just ended."""
        nodes = tuple(nodes)
        self._risk.observe(nodes, snapshot.at_s)
        quotes = self._risk.quotes(snapshot.node_types, prices, snapshot.at_s)
        spot, limits = self._spot_forecasts(snapshot, nodes), self._limits(snapshot.at_s)
        return self.fleets.with_replica_values(
            replace(snapshot, quotes=quotes, spot=spot, limits=limits), self._risk.hazard
        )

    def _spot_forecasts(self, snapshot: Snapshot, nodes: Iterable[Node]) -> tuple[SpotForecast, ...]:
        """Returns the spot forecasts for deadline jobs. Past nodes are read once, when the first such job appears."""
        if self._spot is None:
            if all(job.spec.deadline is None for job in snapshot.jobs):
                return ()
            self._spot = PoolAvailability()
            self._spot.observe(self._store.nodes(limit=_PAST_NODES), snapshot.at_s)
        self._spot.observe(nodes, snapshot.at_s)
        return spot_forecasts(self._spot, snapshot)

    def _limits(self, now_s: float) -> Limits:
        section = self._config.settings.limits
        month, (of_month, at_s) = month_of(to_us(now_s)), self._summed or ("", now_s)
        is_due = month != of_month or now_s - at_s >= SPEND_PERIOD_S
        if section.month_usd is not None and is_due:
            booked = self._books.spent([], month).teams_month
            running = accrued(self._books.intervals(), to_us(now_s))
            self._spent_micro_usd = sum(booked.values()) + sum(entry.amount_micro_usd for entry in running)
            self._summed = month, now_s
        return replace(limits(section, self._spent_micro_usd, now_s), max_nodes=self._config.max_nodes)
