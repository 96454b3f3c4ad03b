from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import raytide
from raytide.actors.gang import Gang
from raytide.actors.gang.lease_watch import ProgressReporter
from raytide.core.errors import ClusterError, LeaseLostError, WaitTimeoutError
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape

SHAPE = Shape(members=2, min_members=1, resources={"CPU": 2.0, "GPU": 1.0, "memory": 1024.0, "tpu": 4.0})
QUEUED = Lease("", "job-1", SHAPE, LeaseState.WAITING, (), epoch=-1)
MEMBERS = tuple(Member(i, MemberState.READY, f"node-{i}", f"ray-{i}", "", f"{i:036x}") for i in range(2))
ACTIVE = Lease("lease-1", "job-1", SHAPE, LeaseState.ACTIVE, MEMBERS, epoch=1, reason="2 of 2 members are usable")


class Desk:
    """The platform's side: `now` is what the next poll is told; polls of an unchanged lease block until it changes."""

    def __init__(self, *now: Lease | Exception) -> None:
        self.script = list(now)
        self.released: list[str] = []
        self.reports: list[Mapping[str, object]] = []
        self._told = threading.Condition()

    def tell(self, now: Lease | Exception) -> None:
        with self._told:
            self.script.append(now)
            self._told.notify_all()

    def lease(self, job_id: str) -> Lease:
        raise NotImplementedError

    def wait_lease(self, job_id: str, *, newer_than: int, timeout_s: float) -> Lease:
        with self._told:
            self._told.wait_for(lambda: self.script)
            now = self.script.pop(0)
            if isinstance(now, Exception):
                raise now
            return now

    def report(self, job_id: str, progress: Mapping[str, float | int | str]) -> None:
        self.reports.append(dict(progress))

    def release(self, job_id: str, *, error: str = "") -> None:
        self.released.append(error)
        self.tell(LeaseLostError("over"))


def test_a_gang_is_held_for_the_length_of_its_block() -> None:
    desk = Desk(QUEUED, ClusterError("the API restarts"), ACTIVE)
    with Gang(desk, "job-1") as gang:
        assert gang.members == MEMBERS
        gang.report(step=1)
        assert desk.released == []
    assert desk.released == [""]
    assert desk.reports == [{"step": 1}]
    with pytest.raises(LeaseLostError):
        _ = gang.members


def test_a_poll_that_takes_too_long_is_repeated() -> None:
    desk = Desk(ACTIVE)
    with Gang(desk, "job-1") as gang:
        desk.tell(WaitTimeoutError("the API is slow"))
        desk.tell(replace(ACTIVE, epoch=2))
        assert gang.wait_change(1, timeout_s=120).epoch == 2


def test_an_answer_that_cannot_be_read_ends_the_gang() -> None:
    desk = Desk(ACTIVE)
    with Gang(desk, "job-1") as gang:
        desk.tell(ValueError("<html>"))
        with pytest.raises(ClusterError, match=r"the lease of job-1 cannot be read: ValueError\('<html>'\)"):
            gang.wait_change(1, timeout_s=120)


def test_the_last_report_sends_only_what_changed_as_the_script_may_have_reported_under_the_same_names() -> None:
    desk = Desk()
    reporter = ProgressReporter(desk, "job-1")
    reporter.send({"stage": "attempt 1", "failures": 0})
    reporter.close({"stage": "attempt 1", "failures": 1})
    assert desk.reports == [{"stage": "attempt 1", "failures": 0}, {"failures": 1}]


def test_what_failed_in_the_block_is_told() -> None:
    desk = Desk(ACTIVE)
    with pytest.raises(ValueError, match="odd"), Gang(desk, "job-1"):
        raise ValueError("odd")
    assert desk.released == ["ValueError: odd"]


class Away(Desk):
    """It cannot record so many releases."""

    def __init__(self, times: int, *now: Lease | Exception) -> None:
        super().__init__(*now)
        self.times = times

    def release(self, job_id: str, *, error: str = "") -> None:
        self.times -= 1
        if self.times < 0:
            return super().release(job_id, error=error)
        self.tell(LeaseLostError("over"))
        raise ClusterError("the state cannot be written.")


@pytest.mark.parametrize(("times", "released"), [(3, [""]), (10**6, [])])
def test_the_result_of_a_block_is_not_lost_with_the_release(
    monkeypatch: pytest.MonkeyPatch, times: int, released: list[str]
) -> None:
    now, time = iter(range(10**6)), "raytide.actors.gang.gang.time"
    monkeypatch.setattr(time, SimpleNamespace(monotonic=lambda: float(next(now)), sleep=lambda _: None))
    desk = Away(times, ACTIVE)

    def work() -> str:
        with Gang(desk, "job-1"):
            return "result"

    assert work() == "result"
    assert desk.released == released
    with pytest.raises(ValueError, match="odd"), Gang(Away(times, ACTIVE), "job-1"):
        raise ValueError("odd")


def test_a_gang_that_does_not_come_is_given_back() -> None:
    desk = Desk(QUEUED)
    with (
        pytest.raises(WaitTimeoutError, match=r"job-1 had no gang after 0\.01 s") as caught,
        Gang(desk, "job-1", timeout_s=0.01),
    ):
        pass
    assert "raytide why job-1" in caught.value.hint
    assert len(desk.released) == 1


def test_ctrl_c_while_it_waits_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    desk = Desk(QUEUED)
    monkeypatch.setattr(Gang, "_is_settled", interrupted)
    with pytest.raises(KeyboardInterrupt), Gang(desk, "job-1"):
        pass
    assert desk.released == ["KeyboardInterrupt"]


def test_a_gang_that_is_stopped_while_it_waits_says_so() -> None:
    with pytest.raises(LeaseLostError, match="stopped"), Gang(Desk(QUEUED, LeaseLostError("stopped")), "job-1"):
        pass


def test_a_lost_member_shows_and_can_be_waited_for() -> None:
    desk = Desk(ACTIVE)
    with Gang(desk, "job-1") as gang:
        desk.tell(
            replace(ACTIVE, epoch=2, members=(MEMBERS[0], Member(1, incarnation=1)), reason="1 of 2 members are usable")
        )
        assert gang.wait_change(1, timeout_s=120).epoch == 2
        assert gang.members == MEMBERS[:1]
        with pytest.raises(ClusterError, match=r"member 1 of job-1 is not usable now \(1 of 2"):
            gang.actor_options(1)
        desk.tell(LeaseLostError("job-1 is stopped"))
        with pytest.raises(LeaseLostError, match="stopped"):
            gang.wait_change(2, timeout_s=120)


def test_a_member_is_scheduled_onto_whole_unless_told_otherwise() -> None:
    with Gang(Desk(ACTIVE), "job-1") as gang:
        options = gang.actor_options(1, num_cpus=0.5, name="me")
    strategy = options.pop("scheduling_strategy")
    assert strategy.placement_group.id.hex() == MEMBERS[1].placement_group_id  # type: ignore[attr-defined]
    assert options == {"num_cpus": 0.5, "num_gpus": 1.0, "memory": 1024.0, "resources": {"tpu": 4.0}, "name": "me"}


def test_a_gang_that_was_not_entered_holds_nothing() -> None:
    with pytest.raises(LeaseLostError, match="not held"):
        _ = Gang(Desk(), "job-1").lease


def test_the_package_loads_without_ray() -> None:
    root = str(Path(next(iter(raytide.__path__))).parent)
    code = "import sys, raytide.actors.gang; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": root})
