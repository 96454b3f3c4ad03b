"""A replica reports its start, which is shown phase by phase."""

from __future__ import annotations

import pytest

from raytide.actors.serving.ray_serve import startup
from raytide.actors.serving.ray_serve.startup import READY, StartupLog, startup_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(startup.time, "time", lambda: now[0])
    monkeypatch.setattr(startup.time, "monotonic", lambda: now[0])
    return now


def test_a_replica_without_a_report_waits_for_a_node() -> None:
    seen = startup_of("r", 10.0, None, 25.0)
    assert (seen.phases, seen.is_ready, seen.detail) == ((("node", 15.0),), False, "")


def test_each_phase_ends_with_the_next_one(clock: list[float]) -> None:
    published: list[bytes] = []
    log = StartupLog(published.append, process_at_s=30.0)
    for at_s, phase in ((40.0, "stage"), (60.0, "load"), (65.0, "warm-up")):
        clock[0] = at_s
        log.begin(phase)
    seen = startup_of("r", 10.0, published[-1], 66.0)
    phases = (("node", 20.0), ("process", 10.0), ("stage", 20.0), ("load", 5.0), ("warm-up", 1.0))
    assert (seen.phases, seen.is_ready) == (phases, False)
    clock[0] = 67.0
    log.begin(READY)
    seen = startup_of("r", 10.0, published[-1], 1000.0)
    assert (seen.phases, seen.is_ready) == ((*phases[:-1], ("warm-up", 2.0)), True)


def test_a_process_that_was_there_before_the_order_took_no_time(clock: list[float]) -> None:
    published: list[bytes] = []
    clock[0] = 12.0
    StartupLog(published.append, process_at_s=5.0).begin("stage")
    assert startup_of("r", 10.0, published[-1], 12.5).phases == (("node", 0.0), ("process", 2.0), ("stage", 0.5))


def test_copied_bytes_are_shown_at_most_once_a_second(clock: list[float]) -> None:
    published: list[bytes] = []
    log = StartupLog(published.append, process_at_s=99.0)
    log.begin("stage")
    for step in range(1, 31):
        clock[0] = 100.0 + step / 10
        log.progress(step * 10**9, 30 * 10**9)
    assert 3 <= len(published) <= 5
    assert startup_of("r", 98.0, published[-1], 104.0).detail.endswith(" of 30.00 GB")
    log.staged(30 * 10**9)
    log.begin("load")
    assert startup_of("r", 98.0, published[-1], 104.0).detail == "30.00 GB copied"
