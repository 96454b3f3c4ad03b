"""The demand on an endpoint with an SLO is known through outages of its replicas and silences of Serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.autoscaler.endpoints.request_log import Arrivals, CounterDelta, CounterDeltas, RouterQueue
from raytide.autoscaler.endpoints.slo_controller import SloController
from raytide.autoscaler.spot.reclaim_hazard import ReclaimHazard
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec, Speed
from raytide.core.objects.endpoint_load import Counters, EndpointLoad, ReplicaLoad, ReplicaValue, Traffic
from raytide.core.objects.node import CapacityType, NodeType
from raytide.core.objects.snapshot import EndpointView, Snapshot

SPOT = NodeType(
    name="gpu.spot",
    resources={"GPU": 1},
    market=CapacityType.SPOT,
    price_micro_usd_h=1_000_000,
    zones=("us-1a",),
    max_nodes=20,
)
REPLICAS = Replicas(min=1, max=8, slo_ttft_s=5.0, slo_target=0.95, cold_start_s=30.0, downscale_delay_s=60.0)
SPEC = ServeSpec(name="m", model="/m", resources={"GPU": 1}, replicas=REPLICAS)
STEP_S = 20.0


@dataclass
class Watch:
    """Four replicas answer as many requests a second, until something else is said."""

    fleets: SloController = field(default_factory=SloController)
    at_s: float = 0.0
    counted: dict[str, float] = field(default_factory=dict)
    kv_use: float = 0.1
    slots: int = 8
    paces: dict[str, float] = field(default_factory=dict)
    spec: ServeSpec = SPEC
    late: float = 0.0
    """The lateness of the first replica."""

    def hear(self, ids: str = "abcd", queued: float = 0.0, rps: float = 1.0) -> ReplicaValue:
        worth = self.view(ids, queued, rps).worth
        assert worth is not None
        return worth

    def view(self, ids: str = "abcd", queued: float = 0.0, rps: float = 1.0) -> EndpointView:
        """One look later. Each id a replica that answers."""
        self.at_s += STEP_S
        said = []
        for name in ids:
            count = self.counted[name] = self.counted.get(name, 0.0) + rps * STEP_S
            late = self.late * (name == ids[0])
            counters = Counters(count, 1500.0 * count, 10.0 * count, count, finished=count, late=late)
            said.append(ReplicaLoad(name, self.at_s, 2.0, kv_use=self.kv_use, counters=counters))
        speed = Speed(prefill_tps=1500.0, slots=self.slots, tpot_ms=60.0)
        traffic = Traffic(speed=speed, paces=self.paces)
        load = EndpointLoad(self.at_s, queued + 2.0 * len(ids), len(ids), (), tuple(said), traffic, queued)
        endpoint = Endpoint(self.spec, "me", EndpointState.RUNNING, 0.0, len(ids))
        seen = Snapshot(at_s=self.at_s, node_types=(SPOT,), endpoints=(EndpointView(endpoint, load),))
        (view,) = self.fleets.with_replica_values(seen, ReclaimHazard()).endpoints
        return view

    def hear_for(self, seconds: float, **words: float) -> Iterator[ReplicaValue]:
        for _ in range(int(seconds / STEP_S)):
            yield self.hear(**words)  # type: ignore[arg-type]


def busy() -> Watch:
    """Nobody watched it when it was young."""
    watch = Watch(at_s=5000.0)
    known = list(watch.hear_for(2000.0))
    assert not known[0].is_sure and known[-1].is_sure
    assert known[-1].usual_rps == pytest.approx(4.0) and known[-1].spot >= 4
    return watch


def test_while_nobody_answers_what_is_usual_stays_so_and_those_that_wait_for_too_long_are_late() -> None:
    watch = busy()
    before = watch.hear()
    out = [watch.hear(ids="", queued=4.0 * STEP_S * look) for look in range(1, 31)]
    assert {worth.usual_rps for worth in out} == {before.usual_rps}
    assert min(worth.ondemand for worth in out) >= before.ondemand and min(w.spot for w in out) >= before.spot
    assert out[-1].late_usd > before.late_usd
    back = watch.hear(ids="efgh", queued=2400.0)
    back = watch.hear(ids="efgh", queued=0.0, rps=2400.0 / STEP_S / 4)
    assert back.usual_rps < before.usual_rps  # those had waited: nobody new came


def test_after_a_silence_with_other_replicas_the_usual_rate_is_the_one_before_it() -> None:
    for silence_s, is_sure in ((600.0, True), (1200.0, False)):
        watch = busy()
        before = watch.hear()
        watch.at_s += silence_s
        first, *later = [watch.hear("efgh"), *watch.hear_for(800.0, ids="efgh")]  # type: ignore[arg-type]
        assert first.is_sure is is_sure
        assert first.usual_rps == pytest.approx(before.usual_rps)
        assert min(worth.usual_rps for worth in later) > 0.97 * before.usual_rps
        assert watch.hear("efgh").is_sure is is_sure  # it takes a quarter of an hour


def test_a_short_silence_of_those_who_count_on_loses_nothing() -> None:
    watch = busy()
    watch.at_s += STEP_S
    for name in "abcd":
        watch.counted[name] += STEP_S
    assert watch.hear().usual_rps == pytest.approx(4.0)


def test_a_speed_that_is_learned_anew_throws_nothing_away() -> None:
    watch = busy()
    before = watch.hear()
    watch.slots = 9
    after = watch.hear()
    assert after.is_sure and after.usual_rps == pytest.approx(before.usual_rps)
    assert after.late_per_h == pytest.approx(before.late_per_h, rel=0.05)


def test_node_types_that_seem_to_differ_a_little_now_and_then_throw_nothing_away() -> None:
    watch = busy()
    watch.paces = {"spot": 1.0, "other": 1.1}
    before = [*watch.hear_for(1200.0)][-1]
    assert before.is_sure
    watch.paces = {}
    after = watch.hear()
    assert after.is_sure and after.late_per_h == pytest.approx(before.late_per_h, rel=0.05)


def test_what_full_kv_caches_ask_for_is_held_for_as_long_as_any_fall_of_the_load_takes() -> None:
    watch = Watch(kv_use=1.0)
    assert watch.hear().least == 5
    watch.kv_use = 0.1
    assert [watch.hear().least for _ in range(4)] == [5, 5, 5, 1]


def test_requests_in_the_queue_are_counted_once_and_are_late_once() -> None:
    queue = RouterQueue()
    assert queue.record_interval(taken=10, length=5, from_s=0.0, until_s=15.0) == 15
    assert queue.count_newly_late(12.0) == 2 and queue.count_newly_late(12.0) == 0
    assert queue.record_interval(taken=3, length=2, from_s=15.0, until_s=30.0) == 0
    assert queue.count_newly_late(30.0) == 2
    assert queue.record_interval(taken=4, length=2, from_s=30.0, until_s=40.0) == 4
    assert queue.record_interval(taken=0, length=0, from_s=40.0, until_s=50.0) == 0  # they gave up
    assert queue.count_newly_late(100.0) == 0


def test_who_was_late_in_the_queue_is_not_late_again_when_a_replica_reports_it() -> None:
    queue = RouterQueue()
    queue.record_interval(taken=0, length=6, from_s=0.0, until_s=6.0)
    assert queue.count_newly_late(4.0) == 4
    queue.record_interval(taken=6, length=0, from_s=6.0, until_s=20.0)
    assert queue.deduplicate_late(late=3, in_replicas=6) == 3
    assert queue.deduplicate_late(late=3, in_replicas=3) == 1  # two of them were in time until then
    queue.record_interval(taken=2, length=0, from_s=20.0, until_s=21.0)
    assert queue.deduplicate_late(late=2, in_replicas=2) == 0


def test_requests_that_end_without_a_token_are_forgotten() -> None:
    queue = RouterQueue()
    queue.record_interval(taken=0, length=6, from_s=0.0, until_s=6.0)
    queue.count_newly_late(6.0)
    queue.record_interval(taken=6, length=0, from_s=6.0, until_s=20.0)
    assert queue.deduplicate_late(late=0, in_replicas=0) == 0
    assert queue.deduplicate_late(late=4, in_replicas=4) == 0


@given(looks=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30))
def test_nobody_is_late_more_often_than_once(looks: list[tuple[int, int, int]]) -> None:
    queue, came, told, unreported = RouterQueue(), 0, 0, 0
    for look, (taken, length, late) in enumerate(looks):
        taken = min(taken, len(queue.arrival_s))
        came += queue.record_interval(taken, length, 10.0 * look, 10.0 * (look + 1))
        unreported += taken
        late = min(max(late, queue.reported), unreported)
        unreported -= late
        told += late - queue.deduplicate_late(late, 10**6) + queue.count_newly_late(10.0 * (look + 1) - 5.0)
        assert told <= came


def test_an_engine_s_late_answers_to_those_who_were_late_in_the_queue_do_not_raise_the_price_twice() -> None:
    prices = []
    for late_again in (0.0, 1.0):
        watch = busy()
        watch.hear(queued=80.0)
        watch.hear(queued=80.0)
        watch.late = 60.0 * late_again  # so many of those that waited had been told to be late by then
        prices.append(watch.hear(queued=0.0, rps=2.0).late_usd)
    assert prices[0] == pytest.approx(prices[1], rel=1e-6)


def test_an_endpoint_that_promises_nothing_any_more_follows_its_load() -> None:
    watch = busy()
    watch.spec = SPEC.model_copy(update={"replicas": Replicas(min=1, max=8)})
    assert watch.view().worth is None
    watch.spec = SPEC
    again = watch.view().worth
    assert again is not None and not again.is_sure  # what came meanwhile was not watched


def test_after_a_clock_was_set_back_it_is_watched_anew_with_what_was_learned() -> None:
    watch = busy()
    before = watch.hear()
    watch.at_s -= 3000.0
    first, *later = watch.hear_for(200.0)
    assert not first.is_sure and later[-1].usual_rps == pytest.approx(4.0)
    assert later[-1].late_per_h == pytest.approx(before.late_per_h, rel=0.05)


def test_those_that_wait_have_come_and_are_not_told_again_when_they_are_taken() -> None:
    arrivals, replica = Arrivals(), ReplicaLoad("a", 40.0)
    arrivals.correct(4, 0.0, 20.0)
    arrivals.add(CounterDelta(replica, 20.0, Counters(6.0)))
    arrivals.correct(-4, 20.0, 40.0)
    came_s = arrivals.take_batch(0.0, 100.0).arrival_s.tolist()
    assert came_s == pytest.approx([2.5, 7.5, 12.5, 17.5, 20.0 + 10 / 6, 25.0])


def test_sizes_of_requests_that_nobody_saw_come_are_forgotten() -> None:
    arrivals, words, counted = Arrivals(), CounterDeltas(), 0.0
    for second in range(400):
        counted += 1.0
        counters = Counters(counted, 1000.0 * 16 * counted, 100.0 * 16 * counted, finished=16 * counted)
        load = EndpointLoad(float(second), 0.0, 1, (), (ReplicaLoad("a", float(second), counters=counters),))
        for word in words.update(load):
            arrivals.add(word)
        if second % 20 == 0:
            arrivals.take_batch(0.0, second - 120.0)
            assert len(arrivals.sizes) <= 160
    told = replace(arrivals).take_batch(0.0, 400.0)
    assert set(told.prompt_tokens.tolist()) == {1000.0}
