"""Endpoints scale on meters of their nodes and on values that users report, and by the hour."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.autoscaler.endpoints import targets
from raytide.autoscaler.signals import REPORT_FRESH_S, with_signals
from raytide.core.errors import ConfigError
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad
from raytide.core.objects.node import NodeMeasurement, NodeReading, Signal
from raytide.core.objects.snapshot import EndpointView

NOW = 1000.0
QUEUE = {"name": "queue", "target": 50}
GPU = {"name": "gpu", "target": 0.5}


def endpoint(target: int = 1, **fields: object) -> Endpoint:
    replicas = Replicas.parse({"max": 8, **fields}, where="replicas")
    return Endpoint(ServeSpec(name="m", model="/m", replicas=replicas), "me", EndpointState.RUNNING, 0.0, target)


def load(ready: int = 2, at_s: float = NOW, **signals: float) -> EndpointLoad:
    names = tuple(f"r{i}" for i in range(ready))
    replicas = tuple(ReplicaLoad(name, at_s) for name in names)
    return EndpointLoad(at_s, 0.0, ready, replica_nodes=names, replicas=replicas, signals=signals)


@pytest.mark.parametrize(
    ("signal", "value", "replicas"),
    [
        (QUEUE, 0.0, 1),
        (QUEUE, 150.0, 3),
        (QUEUE, 151.0, 4),
        (QUEUE, 1e9, 8),
        (GPU, 0.54, 2),  # within a tenth of the target
        (GPU, 0.56, 3),
        (GPU, 1.0, 4),
        (GPU, 0.1, 1),
    ],
)
def test_the_target_follows_a_signal_within_the_bounds(signal: dict[str, object], value: float, replicas: int) -> None:
    asked = endpoint(target=2, scale_on=[signal])
    assert targets.wanted(asked, load(2, **{str(signal["name"]): value})) == replicas


@given(less=st.floats(0, 1), more=st.floats(0, 1), ready=st.integers(0, 8))
def test_a_busier_meter_never_wants_fewer(less: float, more: float, ready: int) -> None:
    asked, (less, more) = endpoint(scale_on=[GPU]), sorted((less, more))
    assert targets.wanted(asked, load(ready, gpu=less)) <= targets.wanted(asked, load(ready, gpu=more))


def test_the_largest_of_all_counts_and_the_reason_names_it() -> None:
    asked = endpoint(target=1, scale_on=[QUEUE, GPU])
    scale = targets.decide(
        EndpointView(targets.observe(asked, found := load(1, queue=300.0, gpu=0.9), NOW), found), NOW
    )
    assert scale is not None
    assert (scale.replicas, scale.reason) == (6, "1 -> 6: queue is 300, 50 for each replica")


def test_without_a_value_none_is_removed_and_it_is_said() -> None:
    asked = endpoint(target=3, downscale_delay_s=0, scale_on=[QUEUE, GPU])
    for known, lacks in (({"queue": 1.0}, "gpu"), ({"gpu": 0.1}, "queue"), ({"queue": 1.0, "gpu": 0.1}, "")):
        found = load(3, **known)
        view = EndpointView(targets.observe(asked, found, NOW), found)
        assert (targets.decide(view, NOW) is None) == bool(lacks)
        expected = f"{lacks} of scale_on was not reported lately; none is removed" if lacks else ""
        assert targets.stale_signal(view, NOW) == expected


def test_a_queue_wakes_an_endpoint_without_replicas() -> None:
    asked = endpoint(target=0, min=0, scale_on=[QUEUE, GPU])
    assert targets.wanted(asked, load(0, queue=0.0)) == 0
    assert targets.wanted(asked, load(0, queue=1.0)) == 1
    assert targets.missing(asked.spec, load(0, queue=0.0)) == (), "no node has a meter while none runs"


def test_values_are_of_the_endpoints_nodes_and_fresh() -> None:
    asked = endpoint(scale_on=[QUEUE, GPU, {"name": "memory", "target": 0.9}])
    revision = replace(asked, spec=asked.spec.model_copy(update={"name": "m~2"}))
    loads = {"m": load(2), "m~2": load(2), "other": load(2)}
    hosts = {"r0": "node-1", "r1": "node-2", "r9": "node-9"}
    use = {f"node-{i}": {"gpu": Signal(gpu, NOW)} for i, gpu in ((1, 0.4), (2, 0.8), (9, 1.0))}
    measured = {"node-1": NodeMeasurement(NodeReading(NOW, memory_use=0.3), {}, {})}
    reported = {("m", "queue"): Signal(7.0, NOW - REPORT_FRESH_S), ("m", "else"): Signal(1.0, NOW)}
    found = with_signals(loads, [asked, revision], reported, hosts, use, measured, NOW)
    assert found["m"].signals == found["m~2"].signals == {"queue": 7.0, "gpu": pytest.approx(0.6), "memory": 0.3}
    assert found["other"] is loads["other"]
    later = with_signals(loads, [asked], reported, hosts, use, measured, NOW + 60)
    assert later["m"].signals == {}, "a meter counts for ten seconds, a report for five minutes"


def test_the_minimum_follows_the_hours_and_serve_may_keep_the_least() -> None:
    night = {"min": 0, "begin": "20:00", "end": "08:00"}
    noon = {"min": 4, "begin": "12:00", "end": "13:00"}
    asked = endpoint(target=1, min=1, schedule=[night, noon])

    def scaled(hour: int) -> tuple[int, str] | None:
        at_s = datetime(2026, 11, 23, hour, 30, tzinfo=UTC).timestamp()
        now = asked.at(at_s)
        view = EndpointView(replace(now, low_since_s=at_s - 60), load(1, at_s))
        scale = targets.decide(view, at_s)
        return None if scale is None else (scale.replicas, scale.reason)

    assert scaled(9) is None
    assert scaled(12) == (4, "4 to 8 replicas are configured at this hour")
    assert scaled(21) == (0, "1 -> 0: 0 requests in flight, 8 for each replica, for 60 s")
    assert asked.spec.replicas.least == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scale_on": [QUEUE, QUEUE]}, "names a signal twice"),
        ({"scale_on": [{"name": "gpu", "target": 80}]}, "0 to 1, not 80"),
        ({"scale_on": [{"name": "a b", "target": 1}]}, "name"),
        ({"scale_on": [QUEUE], "slo_target": 0.9, "slo_ttft_s": 1}, "cannot be combined with slo_target"),
        ({"schedule": [{"min": 9}]}, "min above max 8"),
        ({"schedule": [{"min": 0}], "slo_target": 0.9, "slo_ttft_s": 1}, "at all hours"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        endpoint(**fields)
