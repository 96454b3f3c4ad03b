"""The machine's clock is set, forward or back, or the machine is paused: nobody loses a job, a node or money by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.test_controller import Loop

from raytide.control.reconcile.driver_silence import DISCONNECT_GRACE_S, DriverSilence, disconnected_heartbeat_s
from raytide.core.clock import SteadyClock
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import NodeState

HOUR_S = 3600.0


class SetClock:
    """The clock of a process on a machine whose wall clock somebody sets."""

    def __init__(self, wall_s: float = 1e9) -> None:
        self.wall_s, self.monotonic_s = wall_s, 0.0
        self.restart()

    def restart(self) -> None:
        self.steady = SteadyClock(lambda: self.wall_s, lambda: self.monotonic_s)

    def now_s(self) -> float:
        return self.steady.read()[0]

    def wall_ahead_s(self) -> float:
        return self.steady.read()[1]

    def advance(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds

    sleep = advance


class SetLoop(Loop):
    clock: SetClock

    def beat(self, jobs: list[str], count: int, *, api_ahead_s: float = 0.0) -> None:
        """Ticks in which the drivers ask for their leases, by the clock of an API that may have started since."""
        for _ in range(count):
            for job in jobs:
                self.store.heartbeat(job, self.clock.now_s() + api_ahead_s)
            self.tick()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[SetLoop]:
    made = SetLoop(tmp_path, SetClock())
    yield made
    made.store.close()


@pytest.mark.parametrize("api_restarts", [False, True])
@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S, 30 * HOUR_S])
def test_a_step_of_the_clock_ends_no_gang_and_no_node(loop: SetLoop, step_s: float, api_restarts: bool) -> None:
    gang = loop.submit(kind=JobKind.GANG)
    train = loop.submit()
    loop.beat([gang], 60)
    assert [loop.state(job) for job in (gang, train)] == [JobState.RUNNING] * 2
    starting = loop.submit(members=1, resources={"CPU": 2.0})
    loop.beat([gang], 1)  # its node is on its way while the clock is set
    living = {node_id for node_id, machine in loop.world.bought.items() if machine.ended_at_s is None}
    loop.clock.wall_s += step_s
    loop.beat([gang], 120, api_ahead_s=step_s if api_restarts else 0.0)
    assert [loop.state(job) for job in (gang, train, starting)] == [JobState.RUNNING] * 3
    assert all(loop.world.bought[node_id].ended_at_s is None for node_id in living)
    assert all(node.state is NodeState.READY for node in loop.store.nodes(live=True) if node.id in living)
    check_entries(loop)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
def test_replicas_stay_and_follow_their_load_after_a_step(loop: SetLoop, step_s: float) -> None:
    """Serve stamps what it says by the machine's clock."""
    replicas = Replicas(min=1, max=3, target_ongoing=4, downscale_delay_s=3, upscale_delay_s=0)
    spec = ServeSpec(name="m", model="/m", replicas=replicas, resources={"CPU": 2})
    loop.store.save_endpoint(spec, "ana", loop.clock.now_s())
    loop.world.ongoing = 7.0
    loop.tick(60)
    assert loop.store.endpoint("m").target_replicas == 2
    loop.clock.wall_s += step_s
    loop.tick(20)
    assert loop.store.endpoint("m").target_replicas == 2
    loop.world.ongoing = 12.0
    loop.tick(20)
    assert loop.store.endpoint("m").target_replicas == 3, "what Serve says is not taken for stale"
    loop.world.ongoing = 1.0
    loop.tick(60)
    assert loop.store.endpoint("m").target_replicas == 1
    check_entries(loop)


def check_entries(loop: SetLoop) -> None:
    assert all(entry.to_us > entry.from_us for entry in loop.store.books.entries())
    assert all(entry.amount_micro_usd >= 0 for entry in loop.store.books.entries())
    loop.check_ledger()


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
def test_a_controller_that_starts_after_the_step_loses_nothing_either(loop: SetLoop, step_s: float) -> None:
    gang = loop.submit(kind=JobKind.GANG)
    loop.beat([gang], 60)
    last_s = loop.clock.now_s()
    loop.clock.wall_s += step_s
    loop.clock.restart()
    loop.clock.steady.go_on_from(last_s)
    loop.controller = loop.fresh()
    loop.beat([gang], 60)
    assert loop.state(gang) is JobState.RUNNING
    assert loop.clock.now_s() >= last_s
    loop.check_ledger()


def test_a_pause_of_controller_or_machine_ends_no_gang(loop: SetLoop) -> None:
    gang = loop.submit(kind=JobKind.GANG)
    loop.beat([gang], 60)
    loop.clock.advance(HOUR_S)  # the controller, or all of the machine, stood still
    loop.tick()
    assert loop.state(gang) is JobState.RUNNING, "it looks before the driver can ask again"
    loop.beat([gang], 10)
    assert loop.state(gang) is JobState.RUNNING
    loop.until(lambda: loop.state(gang) is JobState.FAILED, ticks=30)  # and one that is silent is still found out


def gang(heartbeat_at_s: float | None, timeout_s: float = 10.0) -> Job:
    spec = JobSpec(
        kind=JobKind.GANG,
        name="g",
        gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)),
        heartbeat_timeout_s=timeout_s,
    )
    return Job("job-1", spec, "ana", JobState.RUNNING, 0.0, heartbeat_at_s=heartbeat_at_s)


def test_silence_is_counted_from_when_the_last_heartbeat_changed() -> None:
    silence, job = DriverSilence(), gang(None)
    assert silence.observe([job], 100.0) == {"job-1": 0.0}
    assert silence.observe([job], 101.0) == {"job-1": 1.0}
    job = replace(job, heartbeat_at_s=5.0)  # whatever it is: there was none before
    assert silence.observe([job], 102.0) == {"job-1": 0.0}
    assert silence.observe([job], 104.5) == {"job-1": 2.5}
    silence.forget()
    assert silence.observe([job], 999.0) == {"job-1": 0.0}


def test_a_driver_that_hung_up_has_a_moment_left() -> None:
    silence, job = DriverSilence(), gang(100.0)
    silence.observe([job], 100.0)
    gone = replace(job, heartbeat_at_s=disconnected_heartbeat_s(100.5))
    assert silence.observe([gone], 100.5)["job-1"] == 10.0 - DISCONNECT_GRACE_S
    assert silence.observe([gone], 101.0)["job-1"] == 10.5 - DISCONNECT_GRACE_S
    assert silence.observe([replace(job, heartbeat_at_s=101.0)], 101.5)["job-1"] == 0.0


def test_a_driver_that_polls_lives_though_the_apis_clock_goes_back() -> None:
    """Its next heartbeat comes a fifth of the timeout later, which here is more than a disconnected driver has left."""
    silence = DriverSilence()
    silence.observe([gang(1000.0, timeout_s=60.0)], 100.0)
    assert silence.observe([gang(400.0, timeout_s=60.0)], 101.0)["job-1"] == 0.0
    assert silence.observe([gang(400.0, timeout_s=60.0)], 112.0)["job-1"] == 11.0


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(-1e5, 1e5), st.none() | st.floats(1.0, 1e9)), max_size=60), st.floats(0.5, 100.0))
def test_whoever_beats_between_any_two_looks_is_never_silent_for_long(
    looks: list[tuple[float, float | None]], timeout_s: float
) -> None:
    """However the clocks of controller and API go."""
    silence, job = DriverSilence(), gang(0.0, timeout_s)
    now_s, since_beat = 0.0, 0
    for passed_s, beat_at_s in looks:
        now_s += passed_s
        if beat_at_s is not None and beat_at_s != job.heartbeat_at_s:
            job, since_beat = replace(job, heartbeat_at_s=beat_at_s), 0
        found = silence.observe([job], now_s)["job-1"]
        assert found <= since_beat * timeout_s / 3 + 1e-6
        since_beat += 1
