"""Applies the deadline policy to the jobs of a live cluster and explains each decision.

The policy treats a gang as one node: a node in a spot zone (a node type in a zone), an on-demand node, or no node. A
gang keeps its on-demand nodes until its spot nodes are ready, so that a move never leaves the gang without nodes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from raytide.autoscaler.deadlines.policy import Allocation, DeadlineJob, ZoneView, decide
from raytide.autoscaler.deadlines.value_iteration import Values, solve, step_of
from raytide.autoscaler.nodes.occupancy import NodeOccupancy
from raytide.autoscaler.spot.availability_model import AvailabilityModel, ReclaimRates
from raytide.autoscaler.spot.pool_availability import PoolAvailability, forecast_from_rates
from raytide.autoscaler.spot.reclaim_hazard import pool_name
from raytide.core.clock import moment
from raytide.core.objects.gang import Lease, LeaseState, MemberState, Shape
from raytide.core.objects.hardware.transfer import DataInput
from raytide.core.objects.job import Job
from raytide.core.objects.node import MARKET_LABEL, CapacityType, NodeState, Resources, fits
from raytide.core.objects.snapshot import MarketConstraint, NodeView, Snapshot, SpotForecast
from raytide.scheduling.market_constraint import alternatives
from raytide.scheduling.offerings import Offering, Offerings

TICK_S = 10.0
"""The longest time until the next decision."""
MARGIN = 0.05
"""The share by which the remaining work is increased, because estimates are sometimes too low."""
RESUME_S = 90.0
"""The time from joined nodes to the first step: victims yield, the gang forms, the checkpoint loads."""
SLOWER = 1.5
"""A launch is expected to take at most this many times the slowest launch of its node type."""
PREFERS_ON_DEMAND: tuple[CapacityType, ...] = (CapacityType.ON_DEMAND, CapacityType.SPOT)
"""The preference of late jobs: on demand first, but spot rather than nothing."""
MOST_STEPS = 256
"""The size of the value table in steps."""


def with_market_constraints(snapshot: Snapshot) -> Snapshot:
    """Returns the snapshot with a market constraint added for each job that has a deadline."""
    jobs = [job for job in snapshot.jobs if job.spec.due_at_s is not None and not job.stop_requested]
    if not jobs:
        return snapshot
    fleet = _Fleet.from_snapshot(snapshot)
    # Jobs with equal restart times are adjacent, so that the cache evicts fewer tables that are needed again.
    found = {job.id: _constraint_for(fleet, job) for job in sorted(jobs, key=fleet.restart_s)}
    return replace(snapshot, stances={job.id: found[job.id] for job in jobs})


def spot_forecasts(availability: PoolAvailability, snapshot: Snapshot) -> tuple[SpotForecast, ...]:
    """Returns one forecast for each set of spot pools that some job with a deadline can use."""
    offerings = Offerings.from_snapshot(snapshot)
    shapes = {_shapes_key(job): job.spec.gang.shapes for job in snapshot.jobs if job.spec.deadline is not None}
    sets = dict.fromkeys(tuple(_spot_pools(_offerings_for(offerings, each))) for each in shapes.values())
    return tuple(availability.forecast(pools, snapshot.at_s) for pools in sets if pools)


_ShapesKey = tuple[tuple[tuple[tuple[str, float], ...], tuple[tuple[str, str], ...], tuple[DataInput, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Options:
    """The offerings for one list of gang shapes, evaluated once for all jobs with these shapes."""

    launch_s: float
    """The longest time that a launch of a fitting node type should take."""
    zones: tuple[ZoneView, ...]
    """The spot pools, as seen by a job that holds none of them."""
    forecast: SpotForecast
    """The forecast of the same pools, in the same order."""
    price_ratio: float
    """The spot price divided by the on-demand price, with what data add to both; at 1 and above spot is not used."""
    has_data: bool
    """True if a price may contain the transfer of data."""


@dataclass(frozen=True, slots=True)
class _Fleet:
    """Indexes of the snapshot that the evaluation of each job uses."""

    snapshot: Snapshot
    offerings: Offerings
    occupancy: NodeOccupancy
    leases: Mapping[str, Lease]
    """Keyed by job."""
    slowest_launch_s: Mapping[str, float]
    """Keyed by node type."""
    ready_nodes: Mapping[tuple[str, str], Sequence[NodeView]]
    """Keyed by node type and zone."""
    _options: dict[_ShapesKey, _Options] = field(default_factory=dict)
    _fits: dict[tuple[object, ...], bool] = field(default_factory=dict)
    """Cache of `_has_room`, by offering and resources."""

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> _Fleet:
        slowest, ready = dict[str, float](), defaultdict[tuple[str, str], list[NodeView]](list)
        for view in snapshot.nodes:
            node = view.node
            if node.state is NodeState.READY:
                ready[node.type, node.zone].append(view)
            if node.ready_at_s is not None:
                slowest[node.type] = max(slowest.get(node.type, 0.0), node.ready_at_s - node.requested_at_s)
        leases = {lease.job_id: lease for lease in snapshot.leases}
        return cls(
            snapshot, Offerings.from_snapshot(snapshot), NodeOccupancy.from_snapshot(snapshot), leases, slowest, ready
        )

    def options(self, job: Job) -> _Options:
        key = _shapes_key(job)
        if key not in self._options:
            self._options[key] = self._options_for(job.spec.gang.shapes)
        return self._options[key]

    def restart_s(self, job: Job) -> float:
        """Returns the longest time from a launch until the job is back at its present step."""
        return 60.0 * math.ceil((self.options(job).launch_s + RESUME_S + job.redo_s) / 60.0)

    def allocation(self, job: Job, pools: Sequence[str], restart_s: float) -> tuple[Allocation, float]:
        """Returns the gang's present allocation, not counting members that leave, and its remaining start-up time in
        seconds. A gang that is only partly on spot counts as on spot.
        """
        lease = self.leases.get(job.id)
        held = [m for m in lease.members if m.has_node and m.state is not MemberState.LEAVING] if lease else []
        views = self.occupancy.views
        nodes = [views[member.node_id].node for member in held if member.node_id in views]
        if lease is None or not nodes:
            return None, 0.0
        requested_s = max(node.requested_at_s for node in nodes)
        starting_s = 0.0 if lease.state is LeaseState.ACTIVE else max(0.0, requested_s + restart_s - self.snapshot.at_s)
        spot = [pool_name(node.type, node.zone) for node in nodes if node.market is CapacityType.SPOT]
        known = [pools.index(pool) for pool in spot if pool in pools]
        return (known[0] if known else None if spot else "on_demand"), starting_s

    def may_move(self, job: Job) -> bool:
        """Returns whether the gang may leave its nodes.

        It may if it has not formed yet. A preemptible gang may also leave them if it is alone on its nodes and requests
        no market itself, or if it has another shape for on demand.
        """
        lease = self.leases.get(job.id)
        if lease is None or not any(m.is_usable or m.state is MemberState.FORMING for m in lease.members):
            return True
        views = [self.occupancy.views.get(m.node_id) for m in lease.members if m.has_node]
        is_alone = all(view is None or self.occupancy.tenants_of(view).hosts_only(lease) for view in views)
        is_free = is_alone and MARKET_LABEL not in lease.shape.labels
        return job.spec.is_preemptible and (
            is_free or bool(alternatives(lease.shape, job.spec.gang.shapes, CapacityType.ON_DEMAND))
        )

    def _options_for(self, shapes: Sequence[Shape]) -> _Options:
        offerings = _offerings_for(self.offerings, shapes)
        launches_s = (
            min(SLOWER * self.slowest_launch_s.get(t.name, math.inf), t.launch_timeout_s)
            for t in {offering.node_type.name: offering.node_type for offering in offerings}.values()
        )
        pools = _spot_pools(offerings)
        forecast = _forecast_for(self.snapshot, tuple(pools))
        known = zip(pools.values(), forecast.is_up, forecast.since_s, strict=True)
        zones = tuple(self._zone_view(shapes, offering, is_up, since_s) for offering, is_up, since_s in known)
        has_data = self.offerings.table.transfer is not None and any(shape.inputs for shape in shapes)
        ratio = _price_ratio(self.offerings, shapes)
        return _Options(max(launches_s, default=0.0), zones, forecast, ratio, has_data)

    def _zone_view(self, shapes: Sequence[Shape], offering: Offering, is_up: bool, since_s: float) -> ZoneView:
        """Returns the state of a pool. If its availability differs from the forecast, for instance because it may be
        tried again after a refusal, its age counts from now.
        """
        is_available = self.offerings.refusal(offering) is None or any(
            self._has_room(shape.resources, offering) for shape in shapes
        )
        return ZoneView(is_available, self.age_s(since_s) if is_up == is_available else 0.0)

    def age_s(self, since_s: float) -> float:
        return max(0.0, self.snapshot.at_s - since_s)

    def _has_room(self, resources: Resources, offering: Offering) -> bool:
        """Returns whether a ready node of this pool has room for a member."""
        key = (offering.row, *sorted(resources.items()))
        if key not in self._fits:
            views = self.ready_nodes.get((offering.node_type.name, offering.zone), ())
            self._fits[key] = any(fits(resources, view.available) for view in views)
        return self._fits[key]


def _constraint_for(fleet: _Fleet, job: Job) -> MarketConstraint:
    now_s = fleet.snapshot.at_s
    due_at_s, left_s = job.spec.due_at_s, job.remaining_s(now_s)
    assert due_at_s is not None
    now_s += fleet.snapshot.wall_ahead_s
    due = f"due {moment(due_at_s)}"
    if due_at_s <= now_s:
        reason = f"late: it was {due}; it continues like any other job"
        return MarketConstraint(None, False, due_at_s, left_s, None, reason)
    if left_s is None:
        reason = f"on demand, {due}: its remaining work is unknown before its first steps; estimate_h would give it"
        return MarketConstraint(PREFERS_ON_DEMAND, False, due_at_s, None, None, reason)
    evaluation = JobEvaluation.evaluate(fleet, job, due_at_s - now_s, left_s * (1.0 + MARGIN))
    work_s, chosen = evaluation.policy_job.work_s, evaluation.choose()
    latest_s = due_at_s - work_s - evaluation.policy_job.restart_s
    reason = f"{evaluation.describe(chosen)}: {work_s / 3600:.1f} h of work, {due}"
    if chosen == "on_demand":
        markets = PREFERS_ON_DEMAND
        reason += f"; {evaluation.why_not_spot}"
    else:
        markets = () if chosen is None else (CapacityType.SPOT,)
        stays = chosen is not None and not evaluation.may_move
        reason += "; it cannot be moved from there" if stays else f", on demand from {moment(latest_s)} at the latest"
    return MarketConstraint(markets, evaluation.is_urgent, due_at_s, work_s, latest_s, reason)


@dataclass(frozen=True, slots=True)
class JobEvaluation:
    """The inputs of the deadline policy for one job. `choose` returns the policy's choice."""

    policy_job: DeadlineJob
    zones: tuple[ZoneView, ...]
    options: _Options
    may_move: bool
    """True if the gang may leave its present nodes."""

    @classmethod
    def evaluate(cls, fleet: _Fleet, job: Job, left_s: float, work_s: float) -> JobEvaluation:
        options, restart_s = fleet.options(job), fleet.restart_s(job)
        forecast, zones = options.forecast, options.zones
        held, starting_s = fleet.allocation(job, forecast.pools, restart_s)
        if isinstance(held, int):
            zone = ZoneView(True, fleet.age_s(forecast.since_s[held]))
            zones = (*zones[:held], zone, *zones[held + 1 :])
        policy_job = DeadlineJob(left_s, work_s, restart_s, TICK_S, held, starting_s)
        return cls(policy_job, zones, options, fleet.may_move(job))

    @property
    def is_urgent(self) -> bool:
        return self.policy_job.slack_s < 2.0 * self.policy_job.restart_s

    def choose(self) -> Allocation:
        held = self.policy_job.allocation
        if held is not None and not self.may_move:
            return held
        if not self.zones or self.options.price_ratio >= 1.0 or self.policy_job.slack_s < 0.0:
            return "on_demand"
        chosen = decide(self.policy_job, self.zones, self._values())
        return "on_demand" if chosen is None and held == "on_demand" else chosen

    def describe(self, chosen: Allocation) -> str:
        if chosen is None:
            return "waits for spot"
        held = self.policy_job.allocation
        if held is None or (held == "on_demand") == (chosen == "on_demand"):
            return "on demand" if chosen == "on_demand" else "on spot"
        return "on spot, moves to on demand" if chosen == "on_demand" else "on demand, moves to spot"

    @property
    def why_not_spot(self) -> str:
        if self.policy_job.slack_s < 0.0:
            return "that is more than the time left: it will be late"
        if not self.zones:
            return "no spot node type holds it"
        if self.options.price_ratio >= 1.0:
            return "spot is no cheaper" + (", the transfer of its data included" if self.options.has_data else "")
        if self.is_urgent:
            return "no time is left for another attempt on spot"
        if not any(zone.is_up for zone in self.zones):
            return "no spot is available, and waiting for it does not pay"
        return "spot is not worth its risk"

    def _values(self) -> Values:
        """Returns the value table; its step is at least one restart, rounded up so that many jobs share a table."""
        o, step_s = self.options.forecast, step_of(self.policy_job.restart_s, self.policy_job.left_s, MOST_STEPS)
        rates = (o.lost, o.switched, o.found, o.zone_hazard)
        return _table(rates, 2.0 ** (math.ceil(4.0 * math.log2(step_s)) / 4.0), round(self.options.price_ratio, 2))


_Rates = tuple[tuple[float, ...], tuple[tuple[float, ...], ...], tuple[float, ...], tuple[tuple[float, ...], ...]]


@lru_cache(maxsize=12)
def _table(rates: _Rates, step_s: float, price_ratio: float) -> Values:
    """Returns the solved value table, from a cache: rates change rarely, so a table serves many ticks."""
    lost, switched, found, zone_hazard = map(np.asarray, rates)
    market, far_s = ReclaimRates(lost, switched, found, zone_hazard), MOST_STEPS * step_s
    return solve(market, left_s=far_s, work_s=far_s, restart_s=step_s, price_ratio=price_ratio)


def _shapes_key(job: Job) -> _ShapesKey:
    """Returns a key of the job's shapes. Jobs with equal keys fit the same offerings and pay the same for them."""
    shapes = job.spec.gang.shapes
    return tuple((tuple(shape.resources.items()), tuple(shape.labels.items()), shape.inputs) for shape in shapes)


def _offerings_for(offerings: Offerings, shapes: Sequence[Shape]) -> list[Offering]:
    """Returns the offerings that hold a member of any of the shapes."""
    return list({o.name: o for shape in shapes for o, _ in offerings.offerings_for(shape)}.values())


def _spot_pools(offerings: Sequence[Offering]) -> dict[str, Offering]:
    """Returns the spot offerings by pool name, in the order of the configuration."""
    return {pool_name(o.node_type.name, o.zone): o for o in offerings if o.node_type.market is CapacityType.SPOT}


def _price_ratio(offerings: Offerings, shapes: Sequence[Shape]) -> float:
    """Returns a member's cheapest spot price divided by its cheapest on-demand price, for the first shape with both."""
    for shape in shapes:
        prices: dict[CapacityType, list[float]] = {CapacityType.SPOT: [], CapacityType.ON_DEMAND: []}
        for offering, fit in offerings.offerings_for(shape):
            prices[offering.node_type.market].append(offerings.table.member_price(offering, fit, shape))
        if all(prices.values()) and min(prices[CapacityType.ON_DEMAND]) > 0:
            return min(prices[CapacityType.SPOT]) / min(prices[CapacityType.ON_DEMAND])
    return 1.0


def _forecast_for(snapshot: Snapshot, pools: tuple[str, ...]) -> SpotForecast:
    """Returns the forecast that was learned for these pools, or the prior."""
    found = next((forecast for forecast in snapshot.spot if forecast.pools == pools), None)
    return found or forecast_from_rates(
        pools, [True] * len(pools), [snapshot.at_s] * len(pools), AvailabilityModel(len(pools)).current_rates()
    )
