"""The serving policy's parts: forecast, paper fleets, hazard, stock, and the choice of nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytide.autoscaler.forecast import Forecast
from raytide.autoscaler.hazard import Hazard
from raytide.autoscaler.replica_target import BUCKETS, MissTable, Mix, ReplicaSpeed, bucket_of
from raytide.autoscaler.serving_fleet import FleetNode, Heard, Memory, ServingGoal, plan
from raytide.autoscaler.shadow import Shadow
from raytide.autoscaler.slo_price import SloPrice
from raytide.autoscaler.spot_mix import ONDEMAND, PoolOffer, Risk, choose
from raytide.autoscaler.stock import Stock

SPEED = ReplicaSpeed(prefill_tps=1500.0, slots=8, tpot_s=0.06)
RISK = Risk(recovery_s=200.0, lost_share=1.0)


def mix_of(prompt: float = 1500.0, outputs: float = 20.0, requests: int = 1000) -> Mix:
    mix = Mix(burst=1.0)
    counts = np.bincount(bucket_of(np.full(requests, prompt)), minlength=len(mix.count)).astype(float)
    mix.observe(counts, counts * prompt, 1.0)
    mix.observe_outputs(requests, requests * outputs, requests * outputs**2, 1.0)
    return mix


def chosen(offers: list[PoolOffer], misses: list[float], worth: float = 1000.0, least: int = 1) -> dict[str, int]:
    found = choose(
        offers,
        misses,
        usd_per_missed_share_h=worth,
        risk=RISK,
        cold_start_s=180.0,
        least=least,
        most=len(misses) - 1,
    )
    return dict(found.nodes)


def quiet(at_s: float) -> Heard:
    """A request every ten seconds."""
    count = np.zeros(BUCKETS)
    count[60] = 2.0
    return Heard(
        at_s=at_s,
        dt_s=20.0,
        requests=2,
        prompt_count=count,
        prompt_tokens=count * 1000.0,
        finished=2,
        output_tokens=40.0,
        output_squares=800.0,
        missed=0,
        ongoing=0.0,
        requests_by_s=np.bincount([3, 13], minlength=20),
        prompt_tokens_by_s=np.bincount([3, 13], weights=[1000.0, 1000.0], minlength=20).astype(float),
        lost={},
    )


def falling(most: int, needed: int) -> list[float]:
    return [1.0 if n < needed else 0.5 ** (4 * (n - needed + 1)) for n in range(most + 1)]


def test_the_forecast_follows_a_ramp_one_cold_start_ahead() -> None:
    forecast = Forecast(180.0)
    for tick in range(720):
        forecast.observe(20.0 * tick, 20 + tick, 20.0)
    assert forecast.rate_rps == pytest.approx((20 + 720 + 9) / 20, rel=0.03)


def test_more_replicas_never_miss_more_and_a_higher_rate_never_fewer() -> None:
    table = MissTable.of(mix_of().service(SPEED, 5.0), 2.0, SPEED.slots, 12)
    assert (np.diff(table.shares, axis=0) <= 1e-9).all()
    assert (np.diff(table.shares, axis=1) >= -1e-9).all()


def test_a_paper_fleet_misses_what_a_burst_makes_late() -> None:
    """Twenty prefills of a second at once: one replica is late for all but the first, ten for none."""
    shadow = Shadow(10, SPEED.slots, 180.0)
    service = mix_of().service(SPEED, 5.0)
    for at_s in range(60, 60 * 200, 60):
        requests = np.zeros(60, dtype=np.int64)
        requests[0] = 20
        shadow.observe(float(at_s), requests, requests * 1.0, service, 1 / 3)
    misses = shadow.misses(1 / 3)
    assert misses[1] > 0.4 and misses[10] < 0.01
    assert misses == sorted(misses, reverse=True)


def test_a_zone_that_has_held_long_is_trusted_more_than_one_that_was_lost() -> None:
    hazard = Hazard()
    for minute in range(24 * 60):
        lost = {"bad": 1} if minute % 60 == 59 else {}
        hazard.observe({"good": 2, "bad": 1}, lost, 60.0 * minute, 60.0)
    now_s = 60.0 * 24 * 60
    assert hazard.per_h("good", now_s) < 0.1 < hazard.per_h("bad", now_s)


def test_an_empty_zone_is_asked_ever_less_often_and_a_full_one_keeps_what_it_holds() -> None:
    stock = Stock()
    asked = 0
    for second in range(0, 6 * 3600, 20):
        if stock.most("a", 0, float(second)) > 0:
            asked += 1
            stock.refused("a", 0, float(second))
    assert asked <= 1 + np.log2(6 * 3600 / 30) + 6 * 3600 / 1800
    stock.gave("b")
    stock.refused("b", 2, 0.0)
    assert stock.most("b", 1, 10.0) == 2  # one that left may come back at once
    assert stock.most("b", 2, 40.0) == 3  # and after its rest one more is tried


def test_a_missed_request_is_worth_more_while_too_many_are_missed_and_not_without_end() -> None:
    price = SloPrice(0.99)
    first = price.usd(1.0, 3.06)
    for _ in range(20000):
        price.observe(100, 50, 5.0, 20.0)
    assert first < price.usd(1.0, 3.06) <= 1.6 * first
    for _ in range(20000):
        price.observe(100, 0, 5.0, 20.0)
    assert price.usd(1.0, 3.06) < first


def test_spot_is_bought_where_it_is_to_be_had_and_on_demand_where_it_is_not() -> None:
    misses = falling(8, needed=3)
    ondemand = PoolOffer(ONDEMAND, 3.06, 0, 8)
    assert chosen([ondemand, PoolOffer("a", 0.918, 0, 8, 0.1)], misses).get(ONDEMAND, 0) == 0
    assert chosen([ondemand, PoolOffer("a", 0.918, 0, 0, 0.1)], misses) == {ONDEMAND: 5}


def test_nodes_are_spread_when_losing_a_zone_would_hurt() -> None:
    offers = [PoolOffer(ONDEMAND, 3.06, 0, 8), *(PoolOffer(zone, 0.918, 0, 8, 0.5) for zone in "abc")]
    nodes = chosen(offers, falling(8, needed=3))
    assert len(nodes) == 3 and max(nodes.values()) <= 2


def test_a_node_that_is_there_is_not_left_for_an_equal_one() -> None:
    offers = [PoolOffer("a", 0.918, 0, 8, 0.2), PoolOffer("b", 0.918, 2, 2, 0.2)]
    assert chosen(offers, [1.0, 0.5, 0.0, 0.0], worth=50.0).get("b") == 2


@settings(max_examples=60, deadline=None)
@given(
    held=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    rooms=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    needed=st.integers(1, 6),
    least=st.integers(1, 8),
)
def test_there_are_always_as_many_as_needed_and_a_dearer_miss_never_means_fewer(
    held: list[int], rooms: list[int], needed: int, least: int
) -> None:
    offers = [PoolOffer(ONDEMAND, 3.06, held[0], 10)]
    offers += [PoolOffer(zone, 0.918, held[i + 1], rooms[i], 0.3) for i, zone in enumerate("ab")]
    cheap, dear = (chosen(offers, falling(10, needed), worth=worth, least=least) for worth in (10.0, 10000.0))
    assert sum(cheap.values()) >= least
    assert sum(dear.values()) >= needed
    for nodes in (cheap, dear):
        for offer in offers[1:]:
            assert nodes.get(offer.name, 0) <= max(offer.held, offer.most)


def test_on_demand_stays_until_its_spot_replacement_is_ready() -> None:
    goal = ServingGoal(5.0, 0.99, 1, 8, 180.0, SPEED, 3.06, {"a": 0.918})
    memory = Memory.of(goal)
    memory.learn(quiet(20.0), [])
    there = [FleetNode("1", ONDEMAND, True, 0)]
    first = plan(memory, there, 20.0)
    assert first.launch == ("a",) and first.release == ()
    starting = [*there, FleetNode("2", "a", False, 0)]
    assert plan(memory, starting, 40.0).release == ()
    serving = [*there, FleetNode("2", "a", True, 0)]
    assert plan(memory, serving, 60.0).release == ("1",)
    assert plan(memory, serving, 60.0) == plan(memory, serving, 60.0)
