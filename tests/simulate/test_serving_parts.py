"""Requests, spot capacity, replicas and the bound, each by arithmetic that can be done by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raytide.core.errors import DataError
from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.baselines import ServeTarget, SpotHedge
from raytide.simulate.serving.bound import lower_bound_usd
from raytide.simulate.serving.fleet import SimulatedFleet
from raytide.simulate.serving.requests import Workload, workload
from raytide.simulate.serving.setup import ServingSetup
from raytide.simulate.serving.spot_zones import SpotZones, spot_zones

USD_H = {CapacityType.ON_DEMAND: 3.0, CapacityType.SPOT: 1.0}


def work(arrivals_s: list[float], prefill_s: float = 1.0, decode_s: float = 2.0) -> Workload:
    count = len(arrivals_s)
    return Workload(
        arrival_s=np.array(arrivals_s),
        prompt_tokens=np.full(count, 1500 * prefill_s),
        output_tokens=np.full(count, decode_s / 0.06),
        prefill_s=np.full(count, prefill_s),
        decode_s=np.full(count, decode_s),
    )


def always(*nodes: int) -> SpotZones:
    return SpotZones(tuple("abcdef"[: len(nodes)]), (0.0,), (nodes,))


def fleet(
    setup: ServingSetup, arrivals_s: list[float], zones: SpotZones | None = None, **kinds: float
) -> SimulatedFleet:
    return SimulatedFleet(setup, work(arrivals_s, **kinds), zones or always(4))


def ready(fleet: SimulatedFleet, at_s: float, *, zone: int | None = None) -> None:
    replica = fleet.launch_ondemand() if zone is None else fleet.launch_spot(zone)
    assert replica is not None
    fleet.advance(at_s)
    fleet.admit(replica)


def test_prefill_is_first_come_and_the_first_token_comes_at_its_end(setup: ServingSetup) -> None:
    one = fleet(setup, [200.0, 200.5, 210.0])
    ready(one, 180.0)
    one.advance(300.0)
    assert one.first_token_s == pytest.approx([201.0, 202.0, 211.0])


def test_a_request_waits_for_a_slot(setup: ServingSetup) -> None:
    narrow = setup.model_copy(update={"slots": 1})
    one = fleet(narrow, [200.0, 200.5])
    ready(one, 180.0)
    one.advance(300.0)
    assert one.first_token_s == pytest.approx([201.0, 204.0])  # the slot is free at 203


def test_a_request_goes_where_it_starts_first(setup: ServingSetup) -> None:
    two = fleet(setup, [200.0, 200.1, 200.2])
    ready(two, 180.0)
    ready(two, 190.0)
    two.advance(300.0)
    assert two.first_token_s == pytest.approx([201.0, 201.1, 202.0])


def test_by_deadline_a_request_that_is_late_anyway_lets_one_go_first_that_is_not(setup: ServingSetup) -> None:
    arrivals_s = [200.0, 200.1, 202.0]
    first_come, by_deadline = (
        fleet(setup.model_copy(update={"queue": queue}), arrivals_s, prefill_s=3.0)
        for queue in ("first-come", "deadline")
    )
    for one in (first_come, by_deadline):
        ready(one, 180.0)
        one.advance(300.0)
    assert first_come.first_token_s == pytest.approx([203.0, 206.0, 209.0])  # the last two after 5 s
    assert by_deadline.first_token_s == pytest.approx([203.0, 209.0, 206.0])


def test_by_deadline_requests_wait_for_the_next_replica_and_those_of_a_lost_one_start_over(setup: ServingSetup) -> None:
    zones = SpotZones(("a",), (0.0, 202.0), ((1,), (0,)))
    one = fleet(setup.model_copy(update={"queue": "deadline"}), [10.0, 200.0, 201.5], zones)
    ready(one, 180.0, zone=0)
    assert one.first_token_s[0] == pytest.approx(181.0)
    one.advance(202.0)
    one.reclaim()
    assert one.first_token_s[1:] == [float("inf")] * 2
    ready(one, 400.0)
    one.advance(500.0)
    assert one.first_token_s[1:] == pytest.approx([401.0, 402.0])


def test_requests_before_the_first_replica_wait_for_it(setup: ServingSetup) -> None:
    one = fleet(setup, [10.0, 20.0])
    ready(one, 180.0)
    assert one.first_token_s == pytest.approx([181.0, 182.0])


def test_what_a_lost_replica_had_not_finished_starts_over_elsewhere(setup: ServingSetup) -> None:
    zones = SpotZones(("a",), (0.0, 202.0), ((1,), (0,)))
    both = fleet(setup, [200.0, 200.1], zones)
    ready(both, 180.0, zone=0)
    ready(both, 190.0)
    both.advance(202.0)
    both.reclaim()
    assert both.first_token_s == pytest.approx([203.0, 201.1]) or both.first_token_s == pytest.approx([201.0, 203.0])
    assert len(both.lost_nodes) == 1
    assert both.node_hours()[CapacityType.SPOT] == pytest.approx(202 / 3600)


def test_an_answer_of_a_lost_replica_goes_on_from_its_tokens_where_the_gateway_resumes_it(setup: ServingSetup) -> None:
    zones = SpotZones(("a",), (0.0, 202.0), ((1,), (0,)))
    resuming = setup.model_copy(update={"queue": "deadline", "resumes": True})
    one = fleet(resuming, [200.0, 201.5], zones)
    ready(one, 180.0, zone=0)
    one.advance(202.0)
    one.reclaim()
    assert one.first_token_s == pytest.approx([201.0, float("inf")])
    ready(one, 400.0)
    one.advance(500.0)
    assert one.first_token_s == pytest.approx([201.0, 401.0])
    assert one.router.done_s == pytest.approx([403.0, 403.0])  # prefilled second; it had one of its two seconds left


def test_a_zone_gives_no_more_than_it_holds(setup: ServingSetup) -> None:
    one = fleet(setup, [1.0], always(2, 0))
    assert [one.launch_spot(0) is None for _ in range(3)] == [False, False, True]
    assert one.launch_spot(1) is None


def test_a_released_replica_is_billed_until_it_is_done(setup: ServingSetup) -> None:
    one = fleet(setup, [200.0])
    ready(one, 180.0)
    one.advance(200.5)
    one.release(one.alive[0])
    one.advance(400.0)
    assert one.node_hours()[CapacityType.ON_DEMAND] == pytest.approx(203 / 3600)


def test_serve_goes_up_after_30_s_and_down_after_600_s_to_the_most_that_was_wanted() -> None:
    target = ServeTarget(24)
    assert [target.update(at, 16.0) for at in (0.0, 20.0, 40.0)] == [1, 1, 4]
    assert target.update(60.0, 1.0) == 4
    assert {target.update(60.0 + 20 * tick, 6.0) for tick in range(1, 30)} == {4}
    assert target.update(660.0, 1.0) == 2


def test_spothedge_tries_each_zone_once_a_tick_and_covers_the_rest_on_demand(setup: ServingSetup) -> None:
    one = fleet(setup, [1.0], always(0, 1, 0))
    policy = SpotHedge(ServeTarget(24, current=3), extra=1)
    policy.tick(one)
    assert [replica.zone for replica in one.of(CapacityType.SPOT)] == [1]
    assert len(one.of(CapacityType.ON_DEMAND)) == 3  # nothing is ready yet
    assert policy.active | policy.preempted == {0, 1, 2}


def test_the_rate_follows_the_envelope_and_the_gaps_are_kept(setup: ServingSetup, tmp_path: Path) -> None:
    envelope = tmp_path / "envelope.csv"
    envelope.write_text("hour,requests\n" + "\n".join(f"{hour},{100 if hour < 12 else 0}" for hour in range(48)))
    made = workload(setup.model_copy(update={"envelope": envelope, "days": 1.0}))
    by_hour = np.bincount((made.arrival_s / 3600).astype(int), minlength=24)
    assert by_hour[:10] == pytest.approx(7200, rel=0.01)
    assert by_hour[14:23] == pytest.approx(0.05 * 7200, rel=0.02)
    assert set(made.prompt_tokens[:2]) == {300, 1500}


def test_neither_the_order_of_rows_nor_hours_that_are_left_out_change_the_requests(
    setup: ServingSetup, tmp_path: Path
) -> None:
    def made(hours: list[int], *, turned: bool) -> Workload:
        envelope, requests = tmp_path / "envelope.csv", tmp_path / "turned.csv"
        envelope.write_text("hour,requests\r\n" + "".join(f"{h},{9 if h % 12 < 6 else 0}\r\n" for h in hours))
        header, *rows = setup.requests.read_text().splitlines()
        requests.write_text("\ufeff" + "\n".join([header, *(rows[::-1] if turned else rows)]))
        changes = {"envelope": envelope, "requests": requests, "days": 0.5}
        return workload(setup.model_copy(update=changes))

    whole = made(list(range(24)), turned=False)
    other = made([hour for hour in reversed(range(24)) if hour % 12 < 6 or hour == 23], turned=True)
    assert np.array_equal(whole.arrival_s, other.arrival_s)
    assert np.array_equal(whole.prompt_tokens, other.prompt_tokens)
    with pytest.raises(DataError, match="two rows for one hour"):
        made([1, 2, 1], turned=False)


def test_an_envelope_without_requests_in_any_window_is_named(setup: ServingSetup, tmp_path: Path) -> None:
    """Two days and ten hours; the only requests are in the last hours, which no whole day holds."""
    envelope = tmp_path / "envelope.csv"
    envelope.write_text("hour,requests\n" + "\n".join(f"{hour},{100 if hour > 55 else 0}" for hour in range(58)))
    for days in (0.25, 1.0, 2.0):
        with pytest.raises(DataError, match="no requests in the hours to simulate"):
            workload(setup.model_copy(update={"envelope": envelope, "days": days}))
    assert workload(setup.model_copy(update={"envelope": envelope, "days": 2.5})).count > 0


def test_capacity_is_multiplied_by_depth_and_starts_over_when_the_trace_ends(setup: ServingSetup) -> None:
    zones = spot_zones(setup.model_copy(update={"days": 2.0, "depth": 3}))
    assert zones.names == ("a", "b")
    assert {row[0] for row in zones.capacity} == {0, 3}
    span_s = 300 * 300.0
    assert zones.at(100.0) == zones.at(span_s + 100.0)
    assert zones.most_in(0.0, 2 * 86400.0) == (3, 3)


def test_the_bound_is_the_price_of_the_work_and_of_the_starts(setup: ServingSetup) -> None:
    hour = setup.model_copy(update={"days": 1 / 24, "cold_start_s": 360.0})
    flat = work([float(second) for second in range(3600)])  # one prefill a second: one replica, always
    assert lower_bound_usd(hour, flat, always(1), USD_H) == pytest.approx(1.0 * 1.1)
    assert lower_bound_usd(hour, flat, always(0), USD_H) == pytest.approx(3.0 * 1.1)
