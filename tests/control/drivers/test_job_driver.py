"""The driver of a managed job: what befalls the cluster is not the job's fault."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytide.control.client import ApiClient
from raytide.control.drivers import job_driver
from raytide.core.errors import (
    AuthError,
    ClusterError,
    DataError,
    DeniedError,
    LeaseLostError,
    StorageError,
    UsageError,
    WaitTimeoutError,
)
from raytide.core.io.private_paths import ROOTS
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.specs.data import DataSpec
from raytide.pipelines.build import Progress
from raytide.queue.lifecycle.jobs import WITHOUT_MEMBERS

SHAPE = Shape(resources={"CPU": 1.0})
JOB = Job("job-1", JobSpec(kind=JobKind.DATA, name="d", gang=GangSpec(shapes=(SHAPE,))), "ana", JobState.ADMITTED, 0.0)
LEASE = Lease("lease-1", "job-1", SHAPE, LeaseState.WAITING, (Member(0),))
READY = MemberState.READY
AWAY = ClusterError("the API does not answer.")


class Api:
    """A client whose answers are given beforehand; an error among them is raised."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.reports: list[object] = []

    def job(self, job_id: str) -> Any:
        return type("View", (), {"job": JOB})

    def wait_lease(self, job_id: str, *, newer_than: int, timeout_s: float) -> object:
        return self._next()

    def report(self, job_id: str, progress: object) -> None:
        self.reports.append(progress)
        self._next()

    def _next(self) -> object:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr("raytide.control.drivers.job_driver.time.sleep", taken.append)
    return taken


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, api: Api | ApiClient, error: Exception | None) -> int:
    def work(job: Job, client: object, run_dir: Path) -> None:
        if error is not None:
            raise error

    (folder / "cluster.json").write_text(json.dumps({"gcs_address": "127.0.9.1:6379"}))
    (folder / "cluster.yaml").write_text(
        (Path(job_driver.__file__).parents[1] / "bootstrap" / "local.yaml").read_text()
    )
    monkeypatch.setenv(ROOTS, "[]")  # restored afterwards
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("raytide.control.drivers.job_driver.ApiClient.of_job", lambda *_: api)
    monkeypatch.setattr(job_driver, "DRIVERS", {JobKind.DATA: work})
    return job_driver.main(str(folder), "job-1")


def test_an_api_that_restarts_is_waited_for(naps: list[float]) -> None:
    active = replace(LEASE, state=LeaseState.ACTIVE, epoch=1, members=(Member(0, READY, "node-1"),))
    api = Api(AWAY, LEASE, AWAY, active)
    assert job_driver.active_lease(api, "job-1") == active  # type: ignore[arg-type]
    assert len(naps) == 2


def test_a_driver_waits_for_its_turn_for_days(naps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    days = iter(range(100))
    monkeypatch.setattr("raytide.control.drivers.job_driver.time.monotonic", lambda: next(days) * 86400.0)
    seatless = replace(LEASE, state=LeaseState.ACTIVE)
    active = replace(seatless, members=(Member(0, READY, "node-1"),), epoch=9)
    assert job_driver.active_lease(Api(LEASE, LEASE, seatless, active), "job-1") == active  # type: ignore[arg-type]


def test_a_report_that_nobody_takes_does_not_end_the_build() -> None:
    api = Api(AWAY)
    report = job_driver.Throttle(api, "job-1")  # type: ignore[arg-type]
    report({"stage": "read"})
    report({"stage": "pack"})
    assert api.reports == [{"stage": "read"}, {"stage": "pack"}]


def test_a_build_that_gets_nowhere_fails_with_that_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = DataSpec(name="stuck", inputs=("x",), out="y", stall_timeout_s=2.0)
    moves = iter(range(3))

    def build(spec: DataSpec, members: object, on_progress: Any) -> None:
        for _ in moves:
            on_progress(Progress("encode", 1, 1, 1.0, 1.0, 1))
        threading.Event().wait()

    active = replace(LEASE, state=LeaseState.ACTIVE, epoch=1, members=(replace(LEASE.members[0], state=READY),))
    api = Api(active)
    monkeypatch.setattr("raytide.pipelines.build.build", build)
    monkeypatch.setattr(job_driver.LeasedMembers, "_watch", lambda *_: None)
    monkeypatch.setattr("raytide.actors.gang.placement_groups.placement_group_of", lambda member: None)
    job = replace(JOB, spec=JOB.spec.model_copy(update={"config": spec.model_dump(mode="json")}))
    with pytest.raises(WaitTimeoutError, match=r"stuck stalled: no progress for 2 s"):
        job_driver.data(job, api, tmp_path)  # type: ignore[arg-type]
    assert list(moves) == []
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_stall_whose_error_is_swallowed_is_noticed_again() -> None:
    def hang() -> None:
        with suppress(WaitTimeoutError):
            threading.Event().wait(120.0)
        threading.Event().wait(120.0)

    with pytest.raises(WaitTimeoutError), job_driver.Stall("stuck", 1.0):
        hang()


@pytest.mark.parametrize("is_separate", [True, False])
def test_a_build_with_users_code_is_refused_where_users_code_runs_as_another_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_separate: bool
) -> None:
    cleaning = {"rules": {"stages": [{"function": "textwrap:dedent"}]}}
    spec = DataSpec.model_validate({"inputs": ("x",), "out": "y", "cleaning": cleaning})
    yaml = (Path(job_driver.__file__).parents[1] / "bootstrap" / "local.yaml").read_text()
    own = "  raytide:\n"
    assert own in yaml
    (tmp_path / "cluster.yaml").write_text(yaml.replace(own, f"{own}    run_as: nobody\n" if is_separate else own))
    monkeypatch.setattr(job_driver, "active_lease", lambda *_: 1 / 0)
    job = replace(JOB, spec=JOB.spec.model_copy(update={"config": spec.model_dump(mode="json")}))
    with pytest.raises(DeniedError if is_separate else ZeroDivisionError):
        job_driver.data(job, Api(), tmp_path)  # type: ignore[arg-type]


def test_a_build_works_on_the_members_that_its_lease_has_and_ends_without_any(
    monkeypatch: pytest.MonkeyPatch, naps: list[float]
) -> None:
    """Members that leave get no more work, unless all do."""
    member = replace(LEASE.members[0], state=READY, placement_group_id="aa")
    other = replace(member, index=1, placement_group_id="bb")
    active = replace(LEASE, state=LeaseState.ACTIVE, epoch=1, members=(member,))
    grown = replace(active, epoch=2, members=(member, other))
    leaving = replace(active, epoch=3, members=(replace(member, state=MemberState.LEAVING), other))
    alone = replace(active, epoch=4, members=(replace(other, state=MemberState.LEAVING),))
    seen: list[list[str]] = []
    api = Api(AWAY, grown, leaving, alone, replace(LEASE, epoch=5))

    def leave(code: int) -> None:
        seen.append([str(code)])
        raise SystemExit

    monkeypatch.setattr("raytide.control.drivers.job_driver.os._exit", leave)
    monkeypatch.setattr("raytide.actors.gang.placement_groups.placement_group_of", lambda m: m.placement_group_id)
    monkeypatch.setattr(
        "raytide.control.drivers.job_driver.threading.Thread", lambda **_: type("T", (), {"start": int})()
    )
    members = job_driver.LeasedMembers(active, api, "job-1")  # type: ignore[arg-type]
    update = members._update

    def noted(lease: Lease) -> None:
        update(lease)
        seen.append(sorted(members()))

    monkeypatch.setattr(members, "_update", noted)
    assert list(members()) == ["aa"]
    with pytest.raises(SystemExit):
        members._watch(1)
    assert seen[:-1] == [["aa", "bb"], ["bb"], ["bb"]]
    assert int(seen[-1][0]) == WITHOUT_MEMBERS >= 128, "it may run again"
    assert api.answers == []


def test_a_driver_that_lost_its_node_has_died_and_not_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    active = replace(LEASE, state=LeaseState.ACTIVE)
    usable = replace(active, members=(replace(LEASE.members[0], state=READY),))
    codes = []
    for answer in (usable, active, AWAY, LEASE):
        api = Api(answer)
        codes.append(run(monkeypatch, tmp_path, api, ClusterError("the build's Ray tasks could not go on.")))
        assert api.reports == []
    assert codes == [255, WITHOUT_MEMBERS, 255, 255], "a gang without members is no failure of its driver"


def test_a_state_that_is_away_as_the_driver_starts_is_not_the_jobs_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    away = json.dumps({"error": StorageError("the state cannot be read.").to_json()}).encode()
    client = ApiClient("http://api", "token")
    monkeypatch.setattr(client._http, "request", lambda *_, **__: (507, away))
    assert run(monkeypatch, tmp_path, client, None) == 255
    with pytest.raises(ClusterError, match="cannot be read"):
        client.package("0" * 64)


def test_what_is_wrong_with_the_job_itself_is_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    api = Api()
    assert 0 < run(monkeypatch, tmp_path, api, DataError("no such column.")) < 128
    assert api.reports == [{"error": "no such column."}]


def test_what_a_job_names_is_looked_at_again_where_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A link may have been put there since the API looked."""
    (tmp_path / "link").symlink_to("/etc")
    config = {"inputs": [str(tmp_path / "link" / "passwd")], "out": str(tmp_path / "out")}
    api = Api()
    named = replace(JOB, spec=JOB.spec.model_copy(update={"config": config}))
    monkeypatch.setattr(api, "job", lambda _: type("View", (), {"job": named}))
    assert run(monkeypatch, tmp_path, api, None) == DeniedError("").exit_code
    assert "in a folder of raytide or the system" in str(api.reports)


@pytest.mark.parametrize(
    "refusal",
    [AuthError("job-1 is stopped, and its token ended with it."), AWAY, UsageError("a job may report 128 values.")],
)
def test_a_last_word_that_is_not_taken_changes_nothing_of_how_the_job_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Exception
) -> None:
    api, error = Api(refusal), LeaseLostError("job-1 is stopped")
    assert run(monkeypatch, tmp_path, api, error) == error.exit_code
    assert capsys.readouterr().err == f"{error.code}: {error}\n"
    assert api.reports == [{"error": str(error)}]
