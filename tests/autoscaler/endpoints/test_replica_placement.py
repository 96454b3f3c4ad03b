"""The serving policy's parts: usual rate, paper fleets, worth of a node, hazard, stock, and the plan that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytide.autoscaler.endpoints.queue_simulator import CounterfactualFleets, ReplicaSpeed, RequestBatch, convex
from raytide.autoscaler.endpoints.replica_placement import FleetNode, FleetPlan, FleetState, ReplicaPool
from raytide.autoscaler.endpoints.replica_value import (
    HysteresisCount,
    IntervalStats,
    ReplicaValueModel,
    SavedModel,
    ServingGoal,
    SloShadowPrice,
    late_with_losses,
)
from raytide.autoscaler.endpoints.traffic import MEMORY_S, RateForecast, RequestRate
from raytide.autoscaler.spot.reclaim_hazard import ReclaimHazard
from raytide.core.objects.endpoint_load import ReplicaValue
from raytide.simulate.serving.zone_backoff import LONGEST_BACKOFF_S, ZoneBackoff

SPEED = ReplicaSpeed(prefill_tps=1500.0, slots=8, tpot_s=0.06)
PROMPT_OF_A_SECOND = 1500.0
ONDEMAND = "on demand"


def served(from_s: float, until_s: float, arrivals_s: list[float], outputs: float = 20.0) -> RequestBatch:
    """Requests with a prefill of one second each."""
    count = len(arrivals_s)
    return RequestBatch(
        from_s, until_s, np.array(arrivals_s), np.full(count, PROMPT_OF_A_SECOND), np.full(count, outputs)
    )


def goal(zones: Sequence[str], slo_target: float = 0.99, max_replicas: int = 8) -> ServingGoal:
    return ServingGoal(5.0, slo_target, 1, max_replicas, 180.0, SPEED, 3.06, dict.fromkeys(zones, 0.918))


def busy_memory(zones: Sequence[str], rps: int = 2, slo_target: float = 0.99, **held: float) -> ReplicaValueModel:
    """An hour and a half of that many requests at the start of every second, with these spot replicas by zone."""
    memory = ReplicaValueModel.from_goal(goal(zones, slo_target))
    for at_s in range(20, 5400, 20):
        came = served(
            at_s - 20.0, float(at_s), [float(second) for second in range(at_s - 20, at_s) for _ in range(rps)]
        )
        memory.learn(IntervalStats(float(at_s), 20.0, 20 * rps, 0, came, held, 0), ReclaimHazard())
    return memory


def at(id: str, pool: str, is_ready: bool, busy: int = 0) -> FleetNode:
    return FleetNode(id, pool, pool != ONDEMAND, is_ready, busy)


def plan(
    memory: ReplicaValueModel,
    nodes: Sequence[FleetNode],
    hazard: ReclaimHazard | None = None,
    most: Mapping[str, int] | None = None,
    now_s: float = 5400.0,
) -> FleetPlan:
    hazard, most = hazard or ReclaimHazard(), most or {}
    prices = memory.goal.spot_usd_h.items()
    pools = [ReplicaPool(z, usd_h, True, hazard.per_h(z, now_s), most.get(z)) for z, usd_h in prices]
    pools.append(ReplicaPool(ONDEMAND, memory.goal.ondemand_usd_h, False, most=most.get(ONDEMAND)))
    by_name = {pool.name: pool for pool in pools}
    return FleetState(memory.value(hazard), by_name, nodes, memory.goal.cold_start_s).plan()


def launched(memory: ReplicaValueModel, **most: int) -> list[str]:
    return sorted(plan(memory, [], most=most).launch)


def test_the_usual_rate_is_a_mean_and_forgets_by_e_in_a_quarter_of_an_hour() -> None:
    usual = RequestRate()
    for _ in range(1000):
        usual.observe(40, 20.0)
    assert usual.rps == pytest.approx(2.0)
    for _ in range(int(MEMORY_S / 20)):
        usual.observe(0, 20.0)
    assert usual.rps == pytest.approx(2.0 / np.e)


def test_a_smooth_trend_is_followed_and_bursts_that_end_before_a_start_are_averaged() -> None:
    smooth, bursty, mean = RateForecast(), RateForecast(), RequestRate()
    for tick in range(6 * 180):
        requests = round(100 + 80 * np.sin(2 * np.pi * tick / 180))  # a period of an hour
        smooth.observe(requests, 20.0, 200.0)
        mean.observe(requests, 20.0)
        bursty.observe(2000 if tick % 90 < 5 else 0, 20.0, 200.0)
    chosen = {name: forecast.best.memory_s for name, forecast in (("smooth", smooth), ("bursty", bursty))}
    assert chosen["smooth"] < MEMORY_S < chosen["bursty"]
    assert smooth.rps != pytest.approx(mean.rps, rel=0.05)


def test_without_a_better_memory_the_usual_one_stays() -> None:
    forecast = RateForecast()
    for _ in range(100):
        forecast.observe(40, 20.0, 200.0)
    assert forecast.best.memory_s == MEMORY_S
    assert forecast.rps == pytest.approx(2.0)


def test_paper_fleets_are_late_for_what_a_burst_makes_late() -> None:
    """Twenty prefills of a second every minute: five of them are in time on each replica, four replicas serve all."""
    paper = CounterfactualFleets(10, SPEED, 5.0)
    for at_s in range(0, 60 * 400, 60):
        paper.observe(served(float(at_s), at_s + 60.0, [float(at_s)] * 20), 1 / 3)
    late = paper.late_per_h(1 / 3)
    assert late[0] == pytest.approx(1200, rel=0.02)
    assert late[1] == pytest.approx(900, rel=0.02)
    assert late[4] == pytest.approx(0, abs=20)


def test_decode_slots_make_requests_wait_too() -> None:
    paper = CounterfactualFleets(4, ReplicaSpeed(prefill_tps=150000.0, slots=2, tpot_s=1.0), 5.0)
    for at_s in range(0, 60 * 400, 60):
        paper.observe(served(float(at_s), at_s + 60.0, [float(at_s)] * 4, outputs=20.0), 0.1)
    late = paper.late_per_h(0.1)
    assert late[1] == pytest.approx(120, rel=0.05)
    assert late[2] < 10


def test_a_rate_that_was_never_seen_is_as_late_as_a_known_one_with_as_many_replicas_for_each_request() -> None:
    paper = CounterfactualFleets(20, SPEED, 5.0)
    for at_s in range(0, 60 * 400, 60):
        paper.observe(served(float(at_s), at_s + 60.0, [float(at_s)] * 20), 1 / 3)
    seen, twice = paper.late_per_h(1 / 3), paper.late_per_h(2 / 3)
    assert twice[2] / twice[0] == pytest.approx(seen[1] / seen[0], rel=0.2)
    assert twice[10] < 0.05 * twice[0]


@settings(max_examples=40, deadline=None)
@given(gaps=st.lists(st.floats(0, 30), min_size=1, max_size=60), rate=st.floats(0.001, 50))
def test_each_replica_spares_something_and_never_more_than_the_one_before(gaps: list[float], rate: float) -> None:
    paper = CounterfactualFleets(12, SPEED, 5.0)
    arrivals = np.cumsum(gaps).tolist()
    paper.observe(served(0.0, arrivals[-1] + 1.0, arrivals), 0.5)
    late = paper.late_per_h(rate)
    assert (np.diff(late) <= 1e-6).all()
    assert (np.diff(late, n=2) >= -1e-6 * late[0]).all()


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=20))
def test_the_convex_curve_is_below_and_falls_ever_less(values: list[float]) -> None:
    curve = convex(np.array(values))
    assert (curve <= np.array(values) + 1e-6).all()
    assert (np.diff(curve) <= 1e-9).all()
    slopes = np.diff(curve)
    assert all(second >= first - 1e-6 for first, second in pairwise(slopes))


def test_a_node_is_bought_for_more_than_its_price_and_kept_until_a_start_would_have_been_paid() -> None:
    nodes = HysteresisCount()
    nodes.update(np.array([9.0, 2.0, 0.5]), 1.0, 0.05, 20.0)
    assert nodes.count == 2
    slack = np.array([9.0, 0.5, 0.1])
    ticks = 0
    while nodes.count == 2 and ticks < 100:
        nodes.update(slack, 1.0, 0.05, 20.0)
        ticks += 1
    assert ticks in (18, 19)  # half a dollar an hour too much: 0.05 after 360 s
    assert nodes.count == 1


def test_a_node_that_was_worth_its_price_in_between_begins_anew() -> None:
    nodes = HysteresisCount()
    for _ in range(20):
        nodes.update(np.array([2.0]), 1.0, 0.05, 20.0)
        for _ in range(17):
            nodes.update(np.array([0.5]), 1.0, 0.05, 20.0)
    assert nodes.count == 1


def test_losses_add_what_is_late_without_the_lost_nodes() -> None:
    late = np.array([100.0, 40.0, 10.0, 0.0])
    spot = np.arange(4)
    assert late_with_losses(late, [(0.1, 0.5)], spot, 0).tolist() == pytest.approx([100.0, 46.0, 13.0, 2.5])
    assert late_with_losses(late, [(0.1, 0.5)], spot, 1).tolist() == pytest.approx([40.0, 13.0, 1.0, 0.5])
    assert late_with_losses(late, [], spot, 0).tolist() == late.tolist()


def test_a_zone_that_has_held_long_is_trusted_more_than_one_that_was_lost() -> None:
    hazard = ReclaimHazard()
    for minute in range(24 * 60):
        lost = {"bad": 1} if minute % 60 == 59 else {}
        hazard.observe({"good": 2, "bad": 1}, lost, 60.0 * minute, 60.0)
    now_s = 60.0 * 24 * 60
    assert hazard.per_h("good", now_s) < 0.1 < hazard.per_h("bad", now_s)


def test_an_empty_zone_is_asked_ever_less_often_but_never_left_alone_for_long() -> None:
    stock = ZoneBackoff()
    asked = []
    for second in range(0, 6 * 3600, 10):
        if stock.max_launches("a", float(second)) != 0:
            asked.append(second)
            stock.on_refused("a", float(second))
    rests = np.diff(asked)
    assert rests[:4].tolist() == [30, 60, 120, 240]
    assert (rests[4:] == LONGEST_BACKOFF_S).all()


def test_a_zone_that_rested_is_tried_with_one_node_and_with_more_once_that_was_given() -> None:
    stock = ZoneBackoff()
    assert stock.max_launches("a", 0.0) is None
    stock.on_reclaimed("a", 0.0)
    assert stock.max_launches("a", 10.0) == 0
    assert stock.max_launches("a", 30.0) == 1
    stock.on_launched("a")
    assert stock.max_launches("a", 31.0) is None


def test_the_first_day_moves_the_price_more_than_a_later_one() -> None:
    price, moved = SloShadowPrice(0.97), []
    for _ in range(4):
        for hour in range(24):
            before = price.moved
            price.observe(3600, 120, 1.0, 3600.0)  # a ninth too many are late
            if hour == 12:
                moved.append(price.moved - before)
    assert moved[0] > 1.5 * moved[-1] > 0.0
    assert all(np.diff(moved) < 0)


def priced(days: int, over: float = 1.0) -> float:
    """Returns the price, relative to the initial one, of which twice as high a price makes half as many late: at the
    initial price twice as many as allowed. `over` times as many are predicted."""
    price, requests = SloShadowPrice(0.99), 1_000_000
    first = price.usd(1.0, 3.06)
    for _ in range(24 * days):
        late = 0.02 * requests / (price.usd(1.0, 3.06) / first)
        price.observe(requests, round(late), requests / 3600.0, 3600.0)
        price.predict(over * 0.02 * requests * np.exp(-price.log_prices), 3600.0)
    return price.usd(1.0, 3.06) / first


def test_the_price_moves_to_where_as_many_are_late_as_the_target_allows_however_many_are_predicted() -> None:
    assert [priced(40, over) for over in (0.3, 1.0, 3.0)] == pytest.approx([2.0, 2.0, 2.0], rel=0.1)


def test_a_bad_first_day_makes_late_requests_no_dearer_than_is_predicted_to_suffice() -> None:
    """Half as many as allowed are late at the initial price, but ten times as many on the first day."""
    known, unknown = SloShadowPrice(0.999), SloShadowPrice(0.999)
    first = known.usd(1.0, 3.06)
    for hour in range(24 * 7):
        for price in (known, unknown):
            price.observe(100_000, 1000 if hour < 24 else 50, 100_000 / 3600, 3600.0)
        known.predict(50 * np.exp(-known.log_prices), 3600.0)
    assert known.usd(1.0, 3.06) < 0.6 * unknown.usd(1.0, 3.06)
    assert unknown.usd(1.0, 3.06) > first


def test_a_missed_request_is_worth_more_while_too_many_are_missed_and_not_without_end() -> None:
    price = SloShadowPrice(0.99)
    first = price.usd(1.0, 3.06)
    for _ in range(20000):
        price.observe(100, 50, 5.0, 20.0)
    assert first < price.usd(1.0, 3.06) <= 3.01 * first
    for _ in range(10 * 20000):
        price.observe(100, 0, 5.0, 20.0)
    assert price.usd(1.0, 3.06) < first


def served_model(held: Mapping[str, float]) -> ReplicaValueModel:
    """An hour with a replica, and spot nodes."""
    memory = ReplicaValueModel.from_goal(goal("ab"))
    for at_s in range(20, 3600, 20):
        came = served(at_s - 20.0, float(at_s), [at_s - 20.0] * 40)
        memory.learn(IntervalStats(float(at_s), 20.0, 40, 1, came, held, 1), ReclaimHazard())
    return memory


def test_fewer_requests_are_predicted_to_be_late_at_a_higher_price_and_more_without_spot() -> None:
    plenty, none = served_model({"a": 8.0}), served_model({})
    assert (np.diff(plenty.price.predicted) <= 1e-9).all() and plenty.price.predicted[0] > plenty.price.predicted[-1]
    assert none.price.predicted.sum() > plenty.price.predicted.sum()
    assert none.price.expected > 0


def test_a_restored_model_has_the_price_of_the_stored_one() -> None:
    known, restored = served_model({"a": 4.0}), ReplicaValueModel.from_goal(goal("ab"))
    initial = restored.price.usd(1.0, 3.06)
    restored.restore(SavedModel.model_validate_json(known.saved.model_dump_json()))
    assert restored.price.usd(1.0, 3.06) == pytest.approx(known.price.usd(1.0, 3.06)) != pytest.approx(initial)
    other = known.saved.model_copy(update={"predicted": (1.0, 2.0)})  # of another number of prices
    restored.restore(other)
    assert len(restored.price.predicted) == len(restored.price.log_prices)


def test_a_model_of_a_release_without_predictions_keeps_its_price() -> None:
    known, restored = served_model({"a": 4.0}), ReplicaValueModel.from_goal(goal("ab"))
    fields = known.saved.model_dump(exclude={"predicted", "expected"})
    restored.restore(SavedModel.model_validate(fields))
    assert (restored.price.moved, restored.price.expected) == (known.price.moved, 0.0)


def test_a_week_with_too_many_late_requests_keeps_them_dear_on_a_good_day() -> None:
    overspent, even = SloShadowPrice(0.99), SloShadowPrice(0.99)
    for price, missed in ((overspent, 3), (even, 1)):
        for _ in range(4320):  # a day
            price.observe(100, missed, 5.0, 20.0)
    overspent.moved = even.moved = 0.0
    assert overspent.usd(1.0, 3.06) > even.usd(1.0, 3.06)
    assert overspent.attained == pytest.approx(0.97) and even.attained == pytest.approx(0.99)
    assert SloShadowPrice(0.99).attained is None


def test_the_reason_tells_what_is_asked_what_is_attained_and_what_spares_are_held_for() -> None:
    worth = ReplicaValue(
        5, 3, 0.01, (9.0, 4.0, 1.0, 0.0), 1.0, 0.4, slo_target=0.99, attained=0.9876, busy=2, for_bursts=1
    )
    reason = FleetState(worth, {}, (), 60.0).plan().reason
    assert "99 % in time are asked, 98.76 % in the last week" in reason
    assert reason.endswith("the usual rate needs 2, bursts 1 more, lost nodes 2 more")
    reason = FleetState(replace(worth, standby=1), {}, (), 60.0).plan().reason
    assert reason.endswith("lost nodes 2 more; 1 of them on demand, since all spot may be lost")


def test_requests_before_the_first_replica_do_not_make_late_ones_dearer() -> None:
    memory = ReplicaValueModel.from_goal(goal("a"))
    first = memory.value(ReclaimHazard()).late_usd
    for step in range(1, 10):
        waiting = IntervalStats(20.0 * step, 20.0, 40, 40, served(0.0, 0.0, []), {}, 0)
        memory.learn(waiting, ReclaimHazard())
    assert memory.value(ReclaimHazard()).late_usd == first


def test_spot_is_bought_where_it_is_to_be_had_and_on_demand_where_it_is_not() -> None:
    memory = busy_memory("a")
    assert set(launched(memory)) == {"a"}
    there = launched(memory, a=0)
    assert set(there) == {ONDEMAND}
    assert 2 <= len(there) <= memory.spot.count  # at least what keeps up, and no more than at the lower price


def test_nodes_are_spread_over_regions_when_losing_one_would_hurt() -> None:
    zones = ("us-east-1a", "us-east-1b", "us-west-2a")
    memory = busy_memory(zones, rps=4)
    assert set(launched(memory)) == set(zones)


def test_a_zone_that_loses_nodes_often_is_left_for_one_that_does_not() -> None:
    memory, hazard = busy_memory("ab", slo_target=0.9), ReclaimHazard()
    for minute in range(24 * 60):
        lost = {"a": 1} if minute % 30 == 29 else {}
        hazard.observe({"a": 2, "b": 2}, lost, 5400.0 + 60.0 * minute, 60.0)
    now_s = 5400.0 + 24 * 3600.0
    first = plan(memory, [], hazard, now_s=now_s).launch
    assert first.count("b") > first.count("a")
    held = [at(f"{zone}{number}", zone, True) for zone in "ab" for number in range(4)]
    released = plan(memory, held, hazard, now_s=now_s).release
    assert released and all(node_id.startswith("a") for node_id in released[:2])


def test_there_are_always_enough_to_keep_up_with_the_work() -> None:
    memory = busy_memory("a", rps=4, slo_target=0.01)
    assert len(launched(memory)) >= 4


@lru_cache
def two_zones(target: float) -> ReplicaValueModel:
    return busy_memory("ab", slo_target=target)


@settings(max_examples=60, deadline=None)
@given(target=st.sampled_from([0.5, 0.9, 0.99]), held=st.lists(st.sampled_from(["a", "b", ONDEMAND]), max_size=10))
def test_a_plan_leaves_no_fewer_nodes_than_are_worth_it_and_the_same_memory_gives_the_same_plan(
    target: float, held: list[str]
) -> None:
    memory = two_zones(target)
    nodes = [at(str(number), zone, True, number % 3) for number, zone in enumerate(held)]
    made = plan(memory, nodes)
    assert len(nodes) + len(made.launch) - len(made.release) >= memory.ondemand.count
    assert plan(memory, nodes) == made
    spot = sum(zone != ONDEMAND for zone in held) + sum(pool != ONDEMAND for pool in made.launch)
    assert spot - sum(nodes[int(node_id)].pool != ONDEMAND for node_id in made.release) <= memory.spot.count


def test_an_on_demand_node_that_starts_is_not_given_up_for_spot_that_may_be_refused() -> None:
    memory = busy_memory("a")
    starting = [at(str(number), ONDEMAND, False) for number in range(memory.ondemand.count)]
    made = plan(memory, starting)
    assert set(made.launch) == {"a"} and made.release == ()


def test_zones_that_were_lost_together_are_expected_to_go_together() -> None:
    apart, together = ReclaimHazard(), ReclaimHazard()
    held = {"us-west-2a": 2, "us-west-2b": 2, "eu-west-1a": 2}
    for hour in range(20):
        now_s = 3600.0 * hour
        apart.observe(held, {"us-west-2a" if hour % 2 else "us-west-2b": 2}, now_s, 20.0)
        together.observe(held, {"us-west-2a": 2, "us-west-2b": 2}, now_s, 20.0)
    shares = [{tuple(zones): share for share, zones in h.losses(held, 72000.0, 200.0)} for h in (apart, together)]
    both = ("us-west-2a", "us-west-2b")
    assert shares[0][both] < 0.5 * shares[0][both[:1]]
    assert shares[1][both] > 2 * shares[1][both[:1]]
    assert all(("eu-west-1a",) in seen and len(seen) == 4 for seen in shares)


def test_on_demand_stays_until_its_spot_replacement_is_ready() -> None:
    memory = ReplicaValueModel.from_goal(goal("a"))
    memory.learn(IntervalStats(20.0, 20.0, 0, 0, served(0.0, 0.0, []), {}, 1), ReclaimHazard())
    there = [at("1", ONDEMAND, True)]
    first = plan(memory, there)
    assert first.launch == ("a",) and first.release == ()
    starting = [*there, at("2", "a", False)]
    assert plan(memory, starting).release == ()
    serving = [*there, at("2", "a", True)]
    assert plan(memory, serving).release == ("1",)


def test_a_replica_that_outlasts_the_loss_of_all_spot_is_bought_on_demand_where_late_requests_are_dear() -> None:
    values = {
        target: busy_memory("a", rps=4, slo_target=target, a=6.0).value(ReclaimHazard()) for target in (0.9, 0.9999)
    }
    assert values[0.9].standby == 0 < values[0.9999].standby < values[0.9999].spot


def test_a_standby_takes_the_place_of_spot_where_no_more_replicas_are_allowed() -> None:
    memory = ReplicaValueModel.from_goal(goal("a", max_replicas=8))
    memory.spot.count, memory.standby.count = 7, 2
    value = memory.value(ReclaimHazard())
    assert (value.spot, value.standby) == (8, 2)


def standing_by(nodes: Sequence[FleetNode], most_ondemand: int | None = None) -> FleetPlan:
    worth = ReplicaValue(4, 2, 0.0, (9.0, 4.0, 1.0, 0.0), usual_rps=1.0, together=0.4, standby=1)
    pools = (ReplicaPool("a", 1.0, True), ReplicaPool(ONDEMAND, 3.0, False, most=most_ondemand))
    return FleetState(worth, {pool.name: pool for pool in pools}, nodes, 60.0).plan()


def test_a_standby_on_demand_is_bought_beside_spot_and_kept() -> None:
    assert standing_by(()).launch == ("a", "a", "a", ONDEMAND)
    spot = [at(str(number), "a", True) for number in range(3)]
    settled = standing_by([*spot, at("3", ONDEMAND, True)])
    assert (settled.launch, settled.release) == ((), ())


def test_spot_takes_the_place_of_a_standby_that_is_not_to_be_had_and_is_kept_until_it_serves() -> None:
    assert standing_by((), most_ondemand=0).launch == ("a",) * 4
    spot = [at(str(number), "a", True) for number in range(4)]
    assert standing_by(spot, most_ondemand=0).release == ()
    starting = standing_by([*spot, at("4", ONDEMAND, False)])
    assert (starting.launch, starting.release) == ((), ())
    assert len(standing_by([*spot, at("4", ONDEMAND, True)]).release) == 1


def test_spot_stays_until_what_replaces_it_on_demand_is_ready() -> None:
    worth = ReplicaValue(spot=1, ondemand=2, late_usd=0.0, late_per_h=(9.0, 4.0, 1.0, 0.0), usual_rps=1.0, together=0.4)
    pools = {pool.name: pool for pool in (ReplicaPool("a", 1.0, True), ReplicaPool(ONDEMAND, 3.0, False))}
    spot = [at("1", "a", True), at("2", "a", True)]
    assert FleetState(worth, pools, spot, 60.0).plan().release == ()
    assert FleetState(worth, pools, [*spot, at("3", ONDEMAND, False)], 60.0).plan().release != ("1",)
    assert FleetState(worth, pools, [*spot, at("3", ONDEMAND, True)], 60.0).plan().release == ("1",)


def test_spot_that_is_no_cheaper_than_on_demand_is_not_bought_and_the_cheapest_on_demand_pool_comes_first() -> None:
    worth = ReplicaValue(spot=3, ondemand=3, late_usd=0.0, late_per_h=(9.0, 4.0, 1.0, 0.0), usual_rps=1.0, together=0.4)
    pools = [
        ReplicaPool("spot", 2.0, True),
        ReplicaPool("dear", 3.0, False),
        ReplicaPool("cheap", 2.0, False, most=2),
    ]
    made = FleetState(worth, {pool.name: pool for pool in pools}, (), 60.0).plan()
    assert made.launch == ("cheap", "cheap", "dear")


LATE = (90.0, 40.0, 20.0, 10.0, 5.0, 2.0, 1.0, 0.5, 0.2)


def mixed(spot: int, ondemand: int, nodes: Sequence[FleetNode] = (), **usd_h: float) -> FleetPlan:
    """A fast replica does three times what a slow one does. What each costs for that, in dollars an hour."""
    worth = ReplicaValue(spot, ondemand, late_usd=0.0, late_per_h=LATE, usual_rps=1.0, together=0.4)
    prices = {"slow": 1.0, "fast": 0.8, "fast.od": 2.0, **usd_h}
    pools = {
        name: ReplicaPool(name, price, not name.endswith("od"), work=3.0 if name.startswith("fast") else 1.0)
        for name, price in prices.items()
    }
    return FleetState(worth, pools, nodes, 60.0).plan()


def doing(id: str, pool: str, is_ready: bool = True) -> FleetNode:
    work = 3.0 if pool.startswith("fast") else 1.0
    return FleetNode(id, pool, not pool.endswith("od"), is_ready, work=work)


def test_what_is_bought_costs_least_for_the_work_and_the_rest_of_it_for_what_is_still_wanted() -> None:
    assert mixed(6, 1).launch == ("fast", "fast")
    assert mixed(7, 1).launch == ("fast", "fast", "slow")  # a third fast one would cost 2.4 for one
    assert mixed(7, 1, fast=0.3).launch == ("fast", "fast", "fast")
    assert mixed(3, 1, fast=1.1).launch == ("slow", "slow", "slow")


def test_a_replica_counts_for_what_it_does_when_others_go_and_when_others_are_lacking() -> None:
    fast, slow = doing("1", "fast"), [doing(str(number), "slow") for number in (2, 3)]
    assert mixed(3, 1, [fast]) == replace(mixed(3, 1, [fast]), launch=(), release=())
    assert sorted(mixed(3, 1, [fast, *slow]).release) == ["2", "3"]
    assert mixed(4, 1, [fast, *slow]).release in (("2",), ("3",))
    assert mixed(2, 1, [fast]).release == ()  # it does more than is wanted, and nobody else does it
    assert mixed(5, 5, [doing("9", "fast.od")], slow=9.0, fast=9.0).launch == ("fast.od",)


@settings(max_examples=100, deadline=None)
@given(
    held=st.lists(st.sampled_from(["slow", "fast", "fast.od"]), max_size=8),
    counts=st.tuples(st.integers(1, 12), st.integers(1, 12)).map(lambda both: (max(both), min(both))),
)
def test_plans_for_a_mixed_fleet_do_what_is_worth_it_and_come_to_rest(held: list[str], counts: tuple[int, int]) -> None:
    nodes = [doing(str(number), pool) for number, pool in enumerate(held)]
    for step in range(20):
        made = mixed(*counts, nodes)
        if not (made.launch or made.release):
            break
        nodes = [node for node in nodes if node.id not in made.release]
        nodes += [doing(f"{step}-{at}", pool) for at, pool in enumerate(made.launch)]
    assert step < 19
    assert sum(node.work for node in nodes) >= counts[0]
    assert sum(node.work for node in nodes if node.is_spot) < counts[0] + 3.0 + 3.0 * len(held)


def test_what_took_days_to_learn_is_known_to_the_next_controller_and_of_another_goal_nothing() -> None:
    old, new = busy_memory("a"), ReplicaValueModel.from_goal(goal("a"))
    old.price.observe(1000, 500, 2.0, 20.0)
    told = SavedModel.model_validate_json(old.saved.model_dump_json())
    new.restore(told)
    assert new.simulator.late_per_h(2.0).tolist() == old.simulator.late_per_h(2.0).tolist()
    assert new.simulator.request_s == old.simulator.request_s
    assert new.price.usd(1.0, 3.0) == old.price.usd(1.0, 3.0)
    assert new.price.attained == old.price.attained == 0.5
    assert new.price.days == old.price.days > 0.0
    other, blank = (
        ReplicaValueModel.from_goal(goal("a", slo_target=0.5)),
        ReplicaValueModel.from_goal(goal("a", slo_target=0.5)),
    )
    other.restore(told)
    assert other.saved == blank.saved


def test_a_memory_of_other_sizes_is_not_taken_for_one_s_own() -> None:
    memory = busy_memory("a")
    before, past = memory.saved, memory.saved
    for late in ([[1.0]], [[1.0], [1.0, 2.0]], []):
        memory.restore(past.model_copy(update={"paper": past.paper.model_copy(update={"late": late})}))
    assert memory.saved == before


def test_replicas_that_turn_out_to_have_more_slots_or_fewer_keep_what_was_counted() -> None:
    memory, rng = busy_memory("a"), np.random.default_rng(0)
    known = memory.saved
    for slots in (9, 2, 8):
        wider = replace(memory.goal, speed=replace(SPEED, slots=slots))
        assert memory.is_for(wider)
        memory.set_goal(wider)
        assert memory.saved == known
    fleets = {slots: CounterfactualFleets(3, ReplicaSpeed(1e9, slots, 1.0), 5.0) for slots in (1, 2, 4)}
    fleets[0] = CounterfactualFleets(3, ReplicaSpeed(1e9, 2, 1.0), 5.0)
    fleets[0].set_speed(ReplicaSpeed(1e9, 4, 1.0))
    came = np.sort(rng.uniform(0.0, 600.0, 300))
    for paper in fleets.values():
        paper.observe(RequestBatch(0.0, 600.0, came, np.ones(300), np.full(300, 5.0)), 0.5)
    late = {slots: sum(map(sum, paper.saved.late)) for slots, paper in fleets.items()}
    assert late[0] == late[4] < late[2] < late[1]


@pytest.mark.parametrize("slots", [1, 3])
def test_slots_that_are_taken_stay_so_when_it_turns_out_that_there_are_others(slots: int) -> None:
    paper = CounterfactualFleets(1, ReplicaSpeed(1e9, 2, 1.0), 5.0)
    paper.observe(RequestBatch(0.0, 1.0, np.zeros(2), np.ones(2), np.array([20.0, 60.0])), 0.5)
    paper.set_speed(ReplicaSpeed(1e9, slots, 1.0))
    paper.observe(RequestBatch(1.0, 2.0, np.full(2, 1.0), np.ones(2), np.ones(2)), 0.5)
    late = np.array(paper.saved.late).sum(axis=0)[1]
    assert late == pytest.approx({1: 2.0, 3: 0.0}[slots], abs=1e-3)
