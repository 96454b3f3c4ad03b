"""A replica's throughput is learned while requests wait on it, and from nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytide.autoscaler.endpoints.cold_start import Start
from raytide.autoscaler.endpoints.load_target import request_s
from raytide.autoscaler.endpoints.queue_simulator import SavedCounts
from raytide.autoscaler.endpoints.replica_throughput import ENOUGH, STRETCH_S, ThroughputMeter
from raytide.autoscaler.endpoints.replica_value import SavedModel
from raytide.autoscaler.endpoints.request_log import CounterDelta, CounterDeltas
from raytide.autoscaler.endpoints.traffic import TrafficMeter, TrafficMonitor
from raytide.control.reconcile.learned_state import PERIOD_S, Knowledge, LearnedState
from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec, Speed
from raytide.core.objects.endpoint_load import Counters, EndpointLoad, ReplicaLoad
from raytide.core.objects.node import CapacityType, Node, NodeState

PROMPT, OUTPUT = 500.0, 100.0
KEY = "m", 5.0, ServeSpec(name="m", model="/m").served
PAST = SavedModel(
    slo_ttft_s=5.0,
    slo_target=0.9,
    max_replicas=8,
    paper=SavedCounts(late=[[1.0]], hours=[1.0], totals=[0.0]),
    price_moved=0.5,
    day_requests=100.0,
)


L4 = Node("node-1", "l4", "a", CapacityType.SPOT, 1, NodeState.READY, 0.0, ray_node_id="ray-1")
SERVED = ServeSpec(name="m", model="/m").served


def word(at_s: float, rps: float, running: float, waiting: float, dt_s: float = 1.0) -> CounterDelta:
    """A second in which so many requests ended."""
    ended = rps * dt_s
    replica = ReplicaLoad("a", at_s, running, waiting)
    return CounterDelta(replica, at_s - dt_s, Counters(0, PROMPT * ended, OUTPUT * ended, finished=ended))


def stretch(
    meter: ThroughputMeter, from_s: float, rps: float = 4.0, running: float = 8.0, waiting: float = 3.0
) -> None:
    for second in range(int(STRETCH_S)):
        meter.observe(word(from_s + second + 1.0, rps, running, waiting))


def test_nothing_is_said_before_enough_was_seen_and_then_it_explains_the_requests_that_were_served() -> None:
    meter = ThroughputMeter()
    for number in range(ENOUGH):
        assert meter.speed is None
        stretch(meter, 100.0 * number)
    speed = meter.speed
    assert speed is not None and speed.slots == 8
    assert request_s(PROMPT, OUTPUT, speed) == pytest.approx(1 / 4.0)


def test_a_replica_on_which_nothing_waits_teaches_nothing_however_slow_it_is() -> None:
    meter = ThroughputMeter()
    for number in range(10):
        stretch(meter, 100.0 * number, rps=0.1, running=1.0, waiting=0.0)
    assert meter.speed is None


def test_a_wait_that_is_too_short_for_every_slot_to_have_had_its_turn_goes_on_or_is_forgotten() -> None:
    meter = ThroughputMeter()
    for second in range(1, 200):
        meter.observe(word(float(second), rps=0.01, running=8.0, waiting=1.0))
    assert not meter.stretches
    meter.observe(word(200.0, rps=0.0, running=8.0, waiting=0.0))
    stretch(meter, 200.0)
    assert len(meter.stretches) == 1
    assert meter.stretches[0].prompt_tps == pytest.approx(4 * PROMPT)


def test_a_few_stretches_in_which_the_engine_stood_still_or_rushed_change_little() -> None:
    meter = ThroughputMeter()
    for number in range(16):
        stretch(meter, 100.0 * number, rps=4.0 if number % 4 else 0.3)
    for number in range(16, 18):
        stretch(meter, 100.0 * number, rps=40.0)
    assert meter.speed is not None
    assert request_s(PROMPT, OUTPUT, meter.speed) == pytest.approx(1 / 4.0, rel=0.2)


def test_speeds_are_learned_by_node_type_and_the_configured_one_wins() -> None:
    own = Speed(prefill_tps=1.0, slots=1, tpot_ms=1.0)
    traffics = TrafficMonitor(())
    endpoint = Endpoint(ServeSpec(name="m", model="/m"), "me", EndpointState.RUNNING, 0.0, 1)
    mine = endpoint.spec.replicas.model_copy(update={"speed": {"l4": own}})
    told = Endpoint(endpoint.spec.model_copy(update={"replicas": mine}), "me", EndpointState.RUNNING, 0.0, 1)
    for second in range(1000):
        ended = 4.0 * second
        counters = Counters(ended, PROMPT * ended, OUTPUT * ended, finished=ended)
        replica = ReplicaLoad("a", float(second), 8.0, 3.0, counters=counters, node="ray-1")
        load = EndpointLoad(float(second), 11.0, 1, ("ray-1",), (replica,))
        learned = traffics.with_traffic({"m": load}, [endpoint], [L4])["m"].traffic
    assert learned is not None and learned.speed is not None and learned.request_s == pytest.approx(0.25, rel=0.01)
    assert traffics.learned == {("m", 0.0, SERVED): {"l4": learned.speed}}
    configured = traffics.with_traffic({"m": load}, [told], [L4])["m"].traffic
    assert configured is not None and configured.speed == own


def test_a_replica_whose_node_is_not_known_teaches_nothing_about_nodes_that_have_not_joined() -> None:
    nodes = (L4, replace(L4, id="node-2", type="a100", ray_node_id=""))
    traffics = TrafficMonitor(())
    endpoint = Endpoint(ServeSpec(name="m", model="/m"), "me", EndpointState.RUNNING, 0.0, 1)
    for second in range(2 * int(STRETCH_S) * ENOUGH):
        counters = Counters(4.0 * second, PROMPT * second, OUTPUT * second, finished=4.0 * second)
        replica = ReplicaLoad("a", float(second), 8.0, 3.0, counters=counters)
        traffics.with_traffic({"m": EndpointLoad(float(second), 11.0, 1, (), (replica,))}, [endpoint], nodes)
    assert traffics.learned == {}


def test_replicas_that_went_while_requests_waited_take_no_memory() -> None:
    meter = TrafficMeter(ServeSpec(name="m", model="/m"))
    for number in range(20):
        for second in (0.0, 1.0):
            replica = ReplicaLoad(str(number), 2 * number + second, 8.0, 3.0, node="ray-1")
            meter.observe(EndpointLoad(replica.at_s, 11.0, 1, ("ray-1",), (replica,)), {"ray-1": L4})
    assert set(meter.speeds["l4"]._waiting) == {"19"}


def test_what_was_learned_outlives_the_controller_and_counts_until_there_is_enough_of_the_new_one_s(
    tmp_path: Path,
) -> None:
    path, speed = tmp_path / "learned.json", Speed(prefill_tps=2000.0, slots=8, tpot_ms=20.0)
    start = Start(node_type="l4", is_bought=True, seconds=90.0)
    told = Knowledge({KEY: {"l4": speed}}, {KEY: (start,)}, {KEY: PAST}, {"job-1": {"l4": 0.5}})
    LearnedState(path).save(told, PERIOD_S)
    assert LearnedState(path).known == told
    traffics = TrafficMonitor((), told.speeds, told.starts)
    endpoint = Endpoint(ServeSpec(name="m", model="/m"), "me", EndpointState.RUNNING, 5.0, 1)
    found = traffics.with_traffic({"m": EndpointLoad(0.0, 0.0, 1, ("ray-1",))}, [endpoint], [L4])["m"].traffic
    assert found is not None and found.speed == speed and traffics.starts == told.starts
    meter = ThroughputMeter(speed)
    for number in range(ENOUGH):
        assert meter.speed == speed
        stretch(meter, 100.0 * number)
    assert meter.speed != speed


@pytest.mark.parametrize(
    "text", ["", "[]", '{"endpoints": null}', '{"endpoints": [{"endpoint": "m"}]}', '{"endpoints": [1]}']
)
def test_a_file_that_says_nothing_useful_is_nothing_learned(tmp_path: Path, text: str) -> None:
    (tmp_path / "learned.json").write_text(text)
    assert LearnedState(tmp_path / "learned.json").known == Knowledge()


@pytest.mark.parametrize("change", [{"paper": {}}, {"expected": None}, {"expected": float("nan")}, {"x": 1}, []])
def test_what_was_learned_in_another_shape_is_dropped_and_the_rest_is_taken(tmp_path: Path, change: Any) -> None:
    path, other = tmp_path / "learned.json", ("other", 1.0, "")
    LearnedState(path).save(Knowledge(fleets={KEY: PAST, other: PAST}), PERIOD_S)
    told = json.loads(path.read_text())
    told["endpoints"][0]["fleet"] = {**PAST.model_dump(), **change} if change else change
    path.write_text(json.dumps(told))
    assert LearnedState(path).known.fleets == {other: PAST}


def test_a_disk_that_takes_nothing_does_not_stop_the_controller_and_what_was_learned_is_kept_later(
    tmp_path: Path,
) -> None:
    path = tmp_path / "full" / "learned.json"
    learned = LearnedState(path)
    learned.save(Knowledge(fleets={KEY: PAST}), PERIOD_S)
    path.parent.mkdir()
    learned.save(Knowledge(fleets={KEY: PAST}), 2 * PERIOD_S)
    assert LearnedState(path).known.fleets == {KEY: PAST}
    assert LearnedState(path.parent).known == Knowledge()


def test_a_word_is_what_was_counted_since_the_last_one_and_the_same_one_says_nothing_twice() -> None:
    words = CounterDeltas()
    first = EndpointLoad(1.0, 0.0, 1, replicas=(ReplicaLoad("a", 1.0, counters=Counters(7.0)),))
    second = EndpointLoad(2.0, 0.0, 1, replicas=(ReplicaLoad("a", 2.0, counters=Counters(9.0)),))
    assert words.update(first) == []
    assert [w.delta.requests for w in (*words.update(second), *words.update(second))] == [2.0]
