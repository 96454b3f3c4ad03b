"""The deadline policy for the jobs of a live cluster: where each may sit now, and in words why. Pure.

What a gang is to the policy: one node, which is a spot zone (a node type in a zone), on demand, or nothing. A gang on
an on-demand node stays there until spot nodes are ready for it, so it is never taken away to wait.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from raytide.autoscaler.deadlines.policy import Allocation, DeadlineJob, ZoneView, decide
from raytide.autoscaler.deadlines.value_iteration import Values, solve
from raytide.autoscaler.nodes.occupancy import NodeOccupancy
from raytide.autoscaler.spot.availability_model import AvailabilityModel
from raytide.autoscaler.spot.availability_model import ReclaimRates as Rates
from raytide.autoscaler.spot.pool_availability import PoolAvailability, forecast_from_rates, pool_name
from raytide.core.objects.deadline import moment
from raytide.core.objects.gang import Lease, LeaseState, MemberState
from raytide.core.objects.job import Job
from raytide.core.objects.node import MARKET_LABEL, CapacityType, NodeState, Resources, fits
from raytide.core.objects.snapshot import MarketConstraint, NodeView, Snapshot, SpotForecast
from raytide.scheduling.market_constraint import alternatives
from raytide.scheduling.offerings import Offering
from raytide.scheduling.offerings import Offerings as Shop

TICK_S = 10.0
"""Until it is decided again, at most."""
MARGIN = 0.05
"""What is left may turn out to be so much more."""
RESUME_S = 90.0
"""From nodes that have joined until work goes on: others give way, the gang forms, the state is loaded."""
SLOWER = 1.5
"""A node may need so many times what the slowest one of its type needed."""
PREFERS_ON_DEMAND: tuple[CapacityType, ...] = (CapacityType.ON_DEMAND, CapacityType.SPOT)
"""Better on spot than nowhere."""
MOST_STEPS = 256
"""Of the table of values: who is further from his deadline looks at it in longer steps."""


def with_market_constraints(snapshot: Snapshot) -> Snapshot:
    """With a stance for each job that has a deadline."""
    due = [job for job in snapshot.jobs if job.spec.due_at_s is not None and not job.stop_requested]
    if not due:
        return snapshot
    fleet = _Fleet.of(snapshot)
    return replace(snapshot, stances={job.id: _constraint_for(fleet, job) for job in due})


def spot_pools(shop: Shop, job: Job) -> dict[str, Offering]:
    """The pools that hold a member of its gang, in the order of the configuration."""
    return {
        pool_name(o.node_type.name, o.zone): o for o in _offers(shop, job) if o.node_type.market is CapacityType.SPOT
    }


def spot_forecasts(watch: PoolAvailability, snapshot: Snapshot) -> tuple[SpotForecast, ...]:
    """What its jobs with a deadline have to know of spot, once for all that could use the same pools."""
    shop = Shop.of(snapshot)
    sets = dict.fromkeys(tuple(spot_pools(shop, job)) for job in snapshot.jobs if job.spec.deadline is not None)
    return tuple(watch.forecast(pools, snapshot.at_s) for pools in sets if pools)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The snapshot, as the judgement of each job looks at it."""

    snapshot: Snapshot
    offerings: Shop
    occupancy: NodeOccupancy
    leases: Mapping[str, Lease]
    """By job."""
    slowest_launch_s: Mapping[str, float]
    """By node type, how long a node of it needed to join at most."""
    ready_nodes: Mapping[tuple[str, str], Sequence[NodeView]]
    """By node type and zone."""
    rooms: dict[tuple[object, ...], bool] = field(default_factory=dict)
    """Whether a node of a pool has room for a member, for many jobs at once."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Fleet:
        slowest, ready = dict[str, float](), defaultdict[tuple[str, str], list[NodeView]](list)
        for view in snapshot.nodes:
            node = view.node
            if node.state is NodeState.READY:
                ready[node.type, node.zone].append(view)
            if node.ready_at_s is not None:
                slowest[node.type] = max(slowest.get(node.type, 0.0), node.ready_at_s - node.requested_at_s)
        leases = {lease.job_id: lease for lease in snapshot.leases}
        return cls(snapshot, Shop.of(snapshot), NodeOccupancy.from_snapshot(snapshot), leases, slowest, ready)

    def restart_s(self, job: Job) -> float:
        """What a start takes at most until work goes on where it was."""
        types = {offer.node_type.name: offer.node_type for offer in _offers(self.offerings, job)}
        joins_s = [
            min(SLOWER * self.slowest_launch_s[name], t.launch_timeout_s)
            if name in self.slowest_launch_s
            else t.launch_timeout_s
            for name, t in types.items()
        ]
        return 60.0 * math.ceil((max(joins_s, default=0.0) + RESUME_S + job.redo_s) / 60.0)

    def allocation(self, job: Job, pools: Sequence[str], restart_s: float) -> tuple[Allocation, float]:
        """What its gang sits on and stays on, and what its start still takes. Partly on spot is as safe as spot."""
        lease = self.leases.get(job.id)
        seated = (
            [m.node_id for m in lease.members if m.has_node and m.state is not MemberState.LEAVING] if lease else []
        )
        nodes = [self.occupancy.views[node_id].node for node_id in seated if node_id in self.occupancy.views]
        if lease is None or not nodes:
            return None, 0.0
        asked_s = max(node.requested_at_s for node in nodes)
        starting_s = 0.0 if lease.state is LeaseState.ACTIVE else max(0.0, asked_s + restart_s - self.snapshot.at_s)
        spot = [pool_name(node.type, node.zone) for node in nodes if node.market is CapacityType.SPOT]
        known = [pools.index(pool) for pool in spot if pool in pools]
        return (known[0] if known else None if spot else "on_demand"), starting_s

    def may_move(self, job: Job) -> bool:
        """Whether its gang can be taken from where it sits: nothing of it stands yet, or it may be preempted, and is
        alone there and asks for no market itself, or has another shape for on demand."""
        lease = self.leases.get(job.id)
        if lease is None or not any(m.is_usable or m.state is MemberState.FORMING for m in lease.members):
            return True
        views = [self.occupancy.views.get(m.node_id) for m in lease.members if m.has_node]
        is_alone = all(view is None or self.occupancy.tenants_of(view).hosts_only(lease) for view in views)
        is_free = is_alone and MARKET_LABEL not in lease.shape.labels
        return job.spec.is_preemptible and (
            is_free or bool(alternatives(lease.shape, job.spec.gang.shapes, CapacityType.ON_DEMAND))
        )

    def zone_view(self, job: Job, offer: Offering, is_up: bool, since_s: float, *, is_held: bool) -> ZoneView:
        """One that can be asked again after a refusal counts as one that has just come back."""
        can_be_had = is_held or self.offerings.refusal(offer) is None or self._has_room(job, offer)
        age_s = max(0.0, self.snapshot.at_s - since_s)
        if is_held or is_up == can_be_had:
            return ZoneView(can_be_had, age_s)
        return ZoneView(can_be_had, 0.0)

    def _has_room(self, job: Job, offer: Offering) -> bool:
        """On a node of that pool that is there."""
        return any(self._has_room_for(shape.resources, offer) for shape in job.spec.gang.shapes)

    def _has_room_for(self, need: Resources, offer: Offering) -> bool:
        key = (offer.row, *sorted(need.items()))
        if key not in self.rooms:
            there = self.ready_nodes.get((offer.node_type.name, offer.zone), ())
            self.rooms[key] = any(fits(need, view.available) for view in there)
        return self.rooms[key]


def _constraint_for(fleet: _Fleet, job: Job) -> MarketConstraint:
    now_s = fleet.snapshot.at_s
    due_at_s, left_s = job.spec.due_at_s, job.remaining_s(now_s)
    assert due_at_s is not None
    now_s += fleet.snapshot.wall_ahead_s
    due = f"due {moment(due_at_s)}"
    if due_at_s <= now_s:
        reason = f"late: it was {due}; it goes on like any other job"
        return MarketConstraint(None, False, due_at_s, left_s, None, reason)
    if left_s is None:
        reason = f"on demand, {due}: how much work it has is not known before its first steps; estimate_h would say it"
        return MarketConstraint(PREFERS_ON_DEMAND, False, due_at_s, None, None, reason)
    case = JobEvaluation.evaluate(fleet, job, due_at_s - now_s, left_s * (1.0 + MARGIN))
    work_s, chosen = case.policy_job.work_s, case.choose()
    latest_s = due_at_s - work_s - case.policy_job.restart_s
    reason = f"{case.describe(chosen)}: {work_s / 3600:.1f} h of work, {due}"
    if chosen == "on_demand":
        markets = PREFERS_ON_DEMAND
        reason += f"; {case.why_not_spot}"
    else:
        markets = () if chosen is None else (CapacityType.SPOT,)
        stays = chosen is not None and not case.may_move
        reason += "; it cannot be taken from there" if stays else f", on demand from {moment(latest_s)} at the latest"
    return MarketConstraint(markets, case.is_urgent, due_at_s, work_s, latest_s, reason)


@dataclass(frozen=True, slots=True)
class JobEvaluation:
    """One job as the policy sees it."""

    policy_job: DeadlineJob
    zones: tuple[ZoneView, ...]
    outlook: SpotForecast
    price_ratio: float
    """Spot over on demand; at 1 and above there is no reason to take spot."""
    may_move: bool
    """Whether it can be taken from where it sits."""

    @classmethod
    def evaluate(cls, fleet: _Fleet, job: Job, left_s: float, work_s: float) -> JobEvaluation:
        pools, restart_s = spot_pools(fleet.offerings, job), fleet.restart_s(job)
        outlook = _forecast_for(fleet.snapshot, tuple(pools))
        held, starting_s = fleet.allocation(job, outlook.pools, restart_s)
        known = enumerate(zip(pools.values(), outlook.is_up, outlook.since_s, strict=True))
        zones = tuple(fleet.zone_view(job, o, up, since, is_held=held == at) for at, (o, up, since) in known)
        seen = DeadlineJob(left_s, work_s, restart_s, TICK_S, held, starting_s)
        return cls(seen, zones, outlook, _price_ratio(fleet.offerings, job), fleet.may_move(job))

    @property
    def is_urgent(self) -> bool:
        return self.policy_job.slack_s < 2.0 * self.policy_job.restart_s

    def choose(self) -> Allocation:
        held = self.policy_job.allocation
        if held is not None and not self.may_move:
            return held
        if not self.zones or self.price_ratio >= 1.0 or self.policy_job.slack_s < 0.0:
            return "on_demand"
        chosen = decide(self.policy_job, self.zones, self._values()).allocation
        return "on_demand" if chosen is None and held == "on_demand" else chosen

    def describe(self, chosen: Allocation) -> str:
        if chosen is None:
            return "waits for spot"
        if self.policy_job.allocation is None or (self.policy_job.allocation == "on_demand") == (chosen == "on_demand"):
            return "on demand" if chosen == "on_demand" else "on spot"
        return "on spot, moves to on demand" if chosen == "on_demand" else "on demand, moves to spot"

    @property
    def why_not_spot(self) -> str:
        if self.policy_job.slack_s < 0.0:
            return "that is more than there is time for: it will be late"
        if not self.zones:
            return "no spot node type holds it"
        if self.price_ratio >= 1.0:
            return "spot is no cheaper"
        if self.is_urgent:
            return "there is no time for another attempt on spot"
        if not any(zone.is_up for zone in self.zones):
            return "no spot is to be had, and waiting for it does not pay"
        return "spot is not worth its risk"

    def _values(self) -> Values:
        """Of steps as long as a start, or longer: of few lengths, so that others find their table here too."""
        o, step_s = self.outlook, max(self.policy_job.restart_s, self.policy_job.left_s / MOST_STEPS)
        rates = (o.lost, o.switched, o.found, o.zone_hazard)
        return _table(rates, 2.0 ** (math.ceil(4.0 * math.log2(step_s)) / 4.0), round(self.price_ratio, 2))


_Rates = tuple[tuple[float, ...], tuple[tuple[float, ...], ...], tuple[float, ...], tuple[tuple[float, ...], ...]]


@lru_cache(maxsize=8)
def _table(rates: _Rates, step_s: float, price_ratio: float) -> Values:
    """For many ticks: the market is learned anew only now and then."""
    lost, switched, found, zone_hazard = map(np.asarray, rates)
    market, far_s = Rates(lost, switched, found, zone_hazard), MOST_STEPS * step_s
    return solve(market, left_s=far_s, work_s=far_s, restart_s=step_s, price_ratio=price_ratio)


def _offers(shop: Shop, job: Job) -> list[Offering]:
    """What holds a member of any of its shapes."""
    return list({o.name: o for shape in job.spec.gang.shapes for o, _ in shop.offerings_for(shape)}.values())


def _price_ratio(shop: Shop, job: Job) -> float:
    """Of the cheapest spot over the cheapest on demand, a member of the first shape that has both."""
    for shape in job.spec.gang.shapes:
        prices: dict[CapacityType, list[float]] = {CapacityType.SPOT: [], CapacityType.ON_DEMAND: []}
        for offer, fit in shop.offerings_for(shape):
            prices[offer.node_type.market].append(offer.price_micro_usd_h / fit)
        if all(prices.values()) and min(prices[CapacityType.ON_DEMAND]) > 0:
            return min(prices[CapacityType.SPOT]) / min(prices[CapacityType.ON_DEMAND])
    return 1.0


def _forecast_for(snapshot: Snapshot, pools: tuple[str, ...]) -> SpotForecast:
    """What was learned of these pools; without it, what is so of spot in general."""
    found = next((outlook for outlook in snapshot.spot if outlook.pools == pools), None)
    return found or forecast_from_rates(
        pools, [True] * len(pools), [snapshot.at_s] * len(pools), AvailabilityModel(len(pools)).current_rates()
    )
