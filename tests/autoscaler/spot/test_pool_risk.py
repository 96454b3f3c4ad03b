"""A pool's rate of interruptions is learned from our own nodes, lost ones included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytide.autoscaler.nodes import spend_limits
from raytide.autoscaler.nodes.lifecycle import ENDED_BY_PROVIDER, TAKEN_BACK, was_taken_back
from raytide.autoscaler.spot.pool_risk import PoolRisk
from raytide.core.objects.cluster_config import LimitsSection
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.snapshot import Limits

SPOT = NodeType(
    name="s",
    resources={"GPU": 1},
    market=CapacityType.SPOT,
    price_micro_usd_h=1_000_000,
    zones=("us-1a", "us-1b", "eu-1a"),
)
HOUR = 3600.0


def node(number: int, zone: str = "us-1a", **changes: object) -> Node:
    made = Node(f"node-{number}", "s", zone, CapacityType.SPOT, 1, NodeState.READY, 0.0, ready_at_s=0.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def per_h(risk: PoolRisk, now_s: float) -> dict[str, float]:
    return {quote.zone: quote.deaths_per_h for quote in risk.quotes((SPOT,), {}, now_s)}


def watched(nodes: list[Node], hours: int) -> PoolRisk:
    risk = PoolRisk()
    for minute in range(0, hours * 60, 5):
        risk.observe(nodes, minute * 60.0)
    return risk


def test_a_pool_that_has_held_nodes_for_long_is_trusted_more_than_an_unknown_one() -> None:
    rates = per_h(watched([node(1)], hours=8), 8 * HOUR)
    assert rates["us-1a"] < 0.2 < 1.0 < rates["us-1b"]


def test_a_loss_counts_once_raises_the_pool_s_rate_and_that_of_its_neighbours_for_a_while() -> None:
    risk = watched([node(1), node(2)], hours=8)
    calm = per_h(risk, 8 * HOUR)
    lost = [node(1), node(2, state=NodeState.DRAINING, reason=TAKEN_BACK)]
    for second in (0, 1, 2):
        risk.observe(lost, 8 * HOUR + second)
    stormy = per_h(risk, 8 * HOUR + 2)
    assert stormy["us-1a"] > 5 * calm["us-1a"]
    assert stormy["us-1b"] - calm["us-1b"] > stormy["eu-1a"] - calm["eu-1a"] > 0
    assert per_h(risk, 8 * HOUR + 1000)["eu-1a"] > calm["eu-1a"]
    risk.observe([node(1)], 8 * HOUR + 1000)
    assert per_h(risk, 8 * HOUR + 1000)["eu-1a"] < stormy["eu-1a"]
    assert sum(risk.hazard.reclaims) == sum(PoolRisk().hazard.reclaims) + 1


def test_a_new_controller_learns_from_the_records_of_nodes_that_are_gone() -> None:
    gone = [
        node(
            n,
            state=NodeState.GONE,
            ended_at_s=n * HOUR,
            reason=f"{ENDED_BY_PROVIDER}: reclaimed" if n % 2 else "idle for 60 s",
        )
        for n in range(1, 5)
    ]
    risk = PoolRisk()
    risk.replay(gone, 5 * HOUR)
    assert sum(risk.hazard.reclaims) == sum(PoolRisk().hazard.reclaims) + 2


def test_a_replay_counts_every_hour_at_its_age_those_of_living_nodes_too() -> None:
    lost = node(1, state=NodeState.GONE, ended_at_s=8 * HOUR, reason=f"{ENDED_BY_PROVIDER}: reclaimed")
    risk, fresh = PoolRisk(), PoolRisk()
    risk.replay([lost, node(2, zone="us-1b")], 10 * HOUR)
    learned = [hours - before for hours, before in zip(risk.hazard.hours, fresh.hazard.hours, strict=True)]
    assert learned == pytest.approx([0.5, 1.5, 6.0, 10.0], abs=0.5)
    assert per_h(risk, 10 * HOUR)["us-1b"] < per_h(fresh, 0.0)["us-1b"] / 4


def test_only_spot_nodes_that_went_unasked_were_taken_back() -> None:
    assert was_taken_back(node(1, state=NodeState.GONE, reason=f"{ENDED_BY_PROVIDER}: reclaimed"))
    assert was_taken_back(node(1, state=NodeState.TERMINATING, reason=f"its deadline has passed: {TAKEN_BACK}"))
    assert not was_taken_back(node(1, state=NodeState.GONE, reason="drained and empty: idle for 60 s"))
    assert not was_taken_back(node(1, market=CapacityType.ON_DEMAND, reason=TAKEN_BACK))


def test_i6_the_fleet_as_it_is_may_stay_until_the_month_ends() -> None:
    """January 1970 began at 0; on its 30th, 48 hours are left."""
    now_s = 29 * 24 * HOUR
    month = LimitsSection(month_usd=1000.0)
    assert spend_limits.limits(month, 520_000_000, now_s) == Limits(8_000_000, 10_000_000, most_micro_usd_h=10_000_000)
    assert spend_limits.limits(month, 2_000_000_000, now_s) == Limits(0, 0, most_micro_usd_h=0)
    tighter = LimitsSection(month_usd=1000.0, soft_usd_h=3, hard_usd_h=4, launches_per_min=5)
    assert spend_limits.limits(tighter, 0, now_s) == Limits(3_000_000, 4_000_000, 5, most_micro_usd_h=4_000_000)
    assert spend_limits.limits(LimitsSection(), 10**12, now_s) == Limits()


def test_the_last_hour_of_a_month_ends_with_the_fleet_that_fitted_into_it() -> None:
    """Half an hour before its end, five dollars are left for a fleet of ten an hour."""
    now_s = 31 * 24 * HOUR - HOUR / 2
    limits = spend_limits.limits(LimitsSection(month_usd=1000.0), 995_000_000, now_s)
    assert (limits.hard_micro_usd_h, limits.most_micro_usd_h) == (5_000_000, 10_000_000)
