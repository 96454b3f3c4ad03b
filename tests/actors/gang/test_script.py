"""The driver of a script, over members whose processes run on this machine."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytide.actors.gang import member_processes, script_attempt, script_runner
from raytide.actors.gang.images import ImagePullError
from raytide.actors.gang.member_actor import pass_on
from raytide.actors.gang.member_processes import MemberProcesses, ProcessExit, ProcessReport
from raytide.actors.gang.script_runner import ScriptRunner
from raytide.core.bounds import reportable
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError, ConfigError, LeaseLostError, RaytideError, ScriptError
from raytide.core.io.process import free_port
from raytide.core.io.working_dir import pack
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.specs.script import ATTEMPTS, FAILURES, ScriptSpec

time_sleep = time.sleep
SHAPE = Shape(members=2, min_members=1, resources={"CPU": 1.0, "GPU": 2.0})


def member(index: int, incarnation: int = 0) -> Member:
    node = f"node-{index}-{incarnation}"
    return Member(index, MemberState.READY, node, node, "127.0.0.1", node, incarnation=incarnation)


ONE = Lease("lease-1", "job-1", SHAPE.model_copy(update={"members": 1}), LeaseState.ACTIVE, (member(0),), epoch=1)
TWO = Lease("lease-1", "job-1", SHAPE, LeaseState.ACTIVE, (member(0), member(1)), epoch=1)


class Platform:
    """The lease as it is now; `tell` changes it."""

    def __init__(self, lease: Lease) -> None:
        self.now: Lease | RaytideError = lease
        self.progress: dict[str, object] = {}
        self._told = threading.Condition()

    def tell(self, now: Lease | RaytideError) -> None:
        with self._told:
            self.now = now
            self._told.notify_all()

    def lease(self, job_id: str) -> Lease:
        return self.wait_lease(job_id, newer_than=-1, timeout_s=0.0)

    def wait_lease(self, job_id: str, *, newer_than: int, timeout_s: float) -> Lease:
        with self._told:
            self._told.wait_for(lambda: not isinstance(self.now, Lease) or self.now.epoch > newer_than, timeout_s)
            if isinstance(self.now, RaytideError):
                raise self.now
            return self.now

    def report(self, job_id: str, progress: Mapping[str, float | int | str]) -> None:
        self.progress.update(progress)


class Host:
    """A member whose node can die: its processes end, and nobody answers."""

    image = ""

    def __init__(self, member: Member, shape: Shape) -> None:
        self.member, self.is_dead = member, False
        self.processes = MemberProcesses()
        self._pool = ThreadPoolExecutor(4)

    def call(self, method: str, *args: object) -> Future[Any]:
        return self._pool.submit(self._do, method, *args)

    def kill(self) -> None:
        self.processes.stop(0.0)
        self._pool.shutdown(wait=False)

    def die(self) -> None:
        self.is_dead = True
        self.processes.stop(0.0)

    def _do(self, method: str, *args: object) -> object:
        answer = getattr(self.processes, method)(*args)
        if self.is_dead:
            raise ClusterError("its node died")
        return answer


class Run:
    """A `ScriptRunner` in a thread, and what it said."""

    def __init__(
        self, code: str, folder: Path, lease: Lease, package: bytes = b"", done: Any = None, **spec: Any
    ) -> None:
        (folder / "train.py").write_text(code)
        self.spec = ScriptSpec.parse({"command": ("python", "train.py"), **spec}, where="test")
        self.platform, self.clock = Platform(lease), VirtualClock(1000.0)
        self.hosts: list[Host] = []
        self.said: list[str] = []
        self._heard = threading.Condition()
        self._pool = ThreadPoolExecutor(1)
        self._package, self._done = package or pack(folder), done
        self.result = self._pool.submit(self._run)

    def wait_for(self, line: str, times: int = 1) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: self.said.count(line) >= times, 60), self.said

    def _run(self) -> None:
        told = {"start": self._start, "say": self._say, "clock": self.clock, "done": self._done}
        ScriptRunner(self.spec, self._package, self.platform, "job-1", **told).run()

    def _start(self, member: Member, shape: Shape) -> Host:
        self.hosts.append(Host(member, shape))
        return self.hosts[-1]

    def _say(self, line: str) -> None:
        with self._heard:
            self.said.append(line)
            self._heard.notify_all()


def refuse_once() -> Callable[..., None]:
    """A `stop` whose first call breaks."""
    stop, calls = MemberProcesses.stop, []

    def refusing(self: MemberProcesses, grace_s: float) -> None:
        calls.append(grace_s)
        if len(calls) == 1:
            raise ClusterError("it died")
        stop(self, grace_s)

    return refusing


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(script_attempt, "SETTLE_S", 0.2)
    runs: list[Run] = []

    def begin(code: str, lease: Lease = TWO, **spec: Any) -> Run:
        runs.append(Run(code, tmp_path, lease, **spec))
        return runs[-1]

    yield begin
    for run in runs:
        run.platform.tell(LeaseLostError("the test is over"))
        run.result.exception(60)


SAY = "import os; print(*(os.environ[n] for n in ('RANK','LOCAL_RANK','WORLD_SIZE','GROUP_RANK')), os.environ['LR'])"


def test_every_process_knows_its_place_as_under_torchrun(start: Start) -> None:
    run = start(SAY, nproc_per_node="gpu", env={"LR": "3e-4"})
    run.result.result(60)
    assert sorted(run.said) == [f"[{rank}] {rank} {rank % 2} 4 {rank // 2} 3e-4" for rank in range(4)]
    assert run.platform.progress["world"] == 4


PLACES = """
import os
names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "ROLE_RANK", "ROLE_WORLD_SIZE", "OMP_NUM_THREADS")
print(*(os.environ.get(name) for name in names))
"""


def test_libraries_that_look_for_torchrun_find_it_and_processes_share_the_cores(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "16")  # as Ray sets it: all CPUs of the member
    run = start(PLACES, ONE, nproc_per_node=2, done={ATTEMPTS: 2})
    run.result.result(60)
    assert sorted(run.said) == ["[0] job-1 2 0 2 1", "[1] job-1 2 1 2 1"]


def test_a_driver_that_runs_again_goes_on_counting(start: Start) -> None:
    first = start("raise SystemExit(3)", ONE, retries=1)
    assert "It was started 2 times" in str(first.result.exception(60))
    assert first.platform.progress.items() >= {ATTEMPTS: 2, FAILURES: 1}.items()
    again = start("raise SystemExit(3)", ONE, retries=1, done={ATTEMPTS: 1, FAILURES: 1})
    assert isinstance(again.result.exception(60), ScriptError)
    assert again.platform.progress[ATTEMPTS] == 2


def test_numbers_that_a_script_reports_itself_are_no_counts_of_its_driver(start: Start) -> None:
    run = start("raise SystemExit(3)", ONE, retries=1, done={"attempts": 40, "failures": 7})
    assert "It was started 2 times" in str(run.result.exception(60))
    assert run.platform.progress.items() >= {ATTEMPTS: 2, FAILURES: 1}.items()
    assert not run.platform.progress.keys() & {"attempts", "failures"}
    earlier = {"stage": "attempt 4", "attempts": 4, "failures": 1}  # the counts of a driver of an earlier release
    run = start("raise SystemExit(3)", ONE, retries=1, done=earlier)
    assert isinstance(run.result.exception(60), ScriptError)
    assert run.platform.progress.items() >= {ATTEMPTS: 5, FAILURES: 1}.items()


def test_a_script_that_reports_texts_under_the_names_of_the_counts_ends_no_later_driver(start: Start) -> None:
    run = start("print(1)", ONE, done={ATTEMPTS: "3 of 10", FAILURES: "nan"})
    run.result.result(60)
    assert run.platform.progress.items() >= {ATTEMPTS: 1, FAILURES: 0}.items()


def test_a_final_exit_code_ends_the_job_whatever_retries_are_left(start: Start) -> None:
    run = start("raise SystemExit(79)", ONE, retries=5, final_exit_codes=(79,))
    assert "ended with exit code 79" in str(run.result.exception(60))
    assert run.platform.progress[ATTEMPTS] == 1


def test_all_meet_at_one_open_port(start: Start) -> None:
    code = """
import os, socket
at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    peer, _ = socket.create_server(at).accept()
    print(peer.recv(10).decode())
else:
    while True:
        try:
            socket.create_connection(at).send(b"met")
            break
        except ConnectionRefusedError:
            pass
"""
    run = start(code)
    run.result.result(60)
    assert run.said == ["[0] met"]


LISTEN = """
import os, socket
if os.environ["RANK"] == "0":
    at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_server(at).close()
    except OSError:
        raise SystemExit(f"the server socket has failed to listen. port: {at[1]}, name: EADDRINUSE")
    print("listens")
"""


@pytest.mark.parametrize("times", [2, 1000])
def test_an_attempt_whose_port_was_opened_by_another_process_is_repeated_with_another_port(
    start: Start, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        taken = foreign.getsockname()[1]
        chosen = itertools.chain([taken] * times, iter(free_port, None))
        monkeypatch.setattr(member_processes, "free_port", lambda: next(chosen))
        run = start(LISTEN, ONE)
        error = run.result.exception(60)
    repeated = f"raytide: another process has opened port {taken} of node-0-0; it is started again with another"
    assert run.said.count(repeated) == min(times, script_runner.MOST_TAKEN_PORTS)
    if times == 2:
        assert error is None and run.said[-1] == "listens"
        assert run.platform.progress[FAILURES] == 0
    else:
        assert isinstance(error, ScriptError) and f"port {taken} of node-0-0" in str(error)


def test_one_process_alone_prints_as_it_is(start: Start) -> None:
    run = start("print('step 1'); print('step 2')", ONE)
    run.result.result(60)
    assert run.said == ["step 1", "step 2"]


FAIL = """
import os, time
print("before")
if os.environ["RANK"] == "1":
    raise SystemExit(7)
time.sleep(600)
"""


def test_a_failing_rank_ends_the_others_and_is_named_with_its_code_and_last_lines(start: Start) -> None:
    run = start(FAIL, grace_s=0.0)
    error = run.result.exception(60)
    assert isinstance(error, ScriptError)
    assert "rank 1 on node-1-0 ended with exit code 7" in str(error)
    assert "before" in str(error)
    assert run.platform.progress["exit_code"] == 7
    assert len(run.hosts) == 2


def test_the_reason_of_a_failure_ends_with_the_last_line_however_long_the_lines_before_are(start: Start) -> None:
    run = start("for _ in range(9): print('x' * 900)\nraise SystemExit('no such file')", ONE)
    assert str(reportable(str(run.result.exception(60)))).endswith("\nno such file")


def test_a_script_is_tried_again_as_often_as_it_says(start: Start) -> None:
    code = (
        "import os, sys; print('attempt', os.environ['RAYTIDE_ATTEMPT']); sys.exit(os.environ['RAYTIDE_ATTEMPT'] < '3')"
    )
    run = start(code, ONE, retries=2)
    run.result.result(60)
    assert [line for line in run.said if line.startswith("attempt")] == ["attempt 1", "attempt 2", "attempt 3"]
    short = start(code, ONE, retries=1)
    assert "It was started 2 times" in str(short.result.exception(60))


def test_packages_that_can_never_be_installed_leave_no_retry(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    run = start("print('ran')", ONE, retries=3, pip=("tidelib==3.0",))
    assert "No matching distribution found for tidelib==3.0" in str(run.result.exception(60))
    assert (len(run.hosts), run.platform.progress["exit_code"]) == (1, 120)
    own = start("raise SystemExit(120)", ONE, retries=1)
    assert "It was started 2 times" in str(own.result.exception(60))


WAIT = """
import os, pathlib, time
print("at", os.environ["WORLD_SIZE"])
while os.environ["RAYTIDE_ATTEMPT"] == "1":
    time.sleep(0.05)
"""


def test_a_dead_node_costs_no_retry_and_the_script_goes_on_with_the_replacement(start: Start) -> None:
    run = start(WAIT)
    run.wait_for("[0] at 2")
    run.wait_for("[1] at 2")
    run.hosts[1].die()
    run.platform.tell(replace(TWO, epoch=2, state=LeaseState.WAITING, members=(member(0), Member(1, incarnation=1))))
    run.platform.tell(replace(TWO, epoch=3, members=(member(0), member(1, 1))))
    run.result.result(60)
    assert [host.member.node_id for host in run.hosts[2:]] == ["node-0-0", "node-1-1"]
    assert run.said.count("[0] at 2") == 2


def test_an_elastic_script_goes_on_with_fewer(start: Start) -> None:
    run = start(WAIT)
    run.wait_for("[1] at 2")
    run.hosts[1].die()
    run.platform.tell(replace(TWO, epoch=2, members=(member(0), Member(1, incarnation=1))))
    run.result.result(60)
    assert run.said[-1] == "at 1"


def test_processes_that_vanish_while_their_node_stays_count_as_a_failure(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_runner, "LOST_WITHIN_S", 0.1)
    run = start(WAIT)
    run.wait_for("[1] at 2")
    run.hosts[1].die()
    error = run.result.exception(60)
    assert isinstance(error, ScriptError)
    assert "the processes on node-1-0 are gone: its node died" in str(error)


LEAVE = """
import os, signal, sys, time
def leave(*_):
    print("saved", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
print("at", os.environ["WORLD_SIZE"], flush=True)
while os.environ["RAYTIDE_ATTEMPT"] == "1":
    time.sleep(0.05)
"""


def test_a_notice_lets_the_script_save_before_it_moves(start: Start) -> None:
    run = start(LEAVE)
    run.wait_for("[0] at 2")
    run.wait_for("[1] at 2")
    leaving = replace(member(1), state=MemberState.LEAVING, leaves_at_s=run.clock.now_s() + 120.0)
    run.platform.tell(replace(TWO, epoch=2, members=(member(0), leaving)))
    assert "[1] saved" not in run.said, "two minutes are more than its grace"
    run.clock.advance(95.0)
    run.wait_for("[0] saved")
    run.wait_for("[1] saved")
    run.platform.tell(replace(TWO, epoch=3, members=(member(0), member(1, 1))))
    run.result.result(60)
    assert "raytide: node-1-0 has to be left; it is started again" in run.said


def test_the_survivors_of_a_lost_node_may_save_too(start: Start) -> None:
    run = start(LEAVE.replace("def leave(*_):", "def leave(*_):\n    time.sleep(0.3)"))
    run.wait_for("[0] at 2")
    run.platform.tell(replace(TWO, epoch=2, members=(member(0), Member(1, incarnation=1))))
    run.result.result(60)
    assert "[0] saved" in run.said
    assert "raytide: node-1-0 is lost; it is started again" in run.said


def test_what_kept_it_from_starting_is_told_and_is_no_lost_node(start: Start) -> None:
    run = start(SAY, ONE, package=b"not a zip file")
    error = run.result.exception(60)
    assert isinstance(error, ScriptError)
    assert "could not be started on node-0-0: DataError: the package is broken: File is not a zip file" in str(error)


def test_the_next_attempt_waits_for_processes_that_nobody_saw_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(
        script_runner.time, "sleep", lambda seconds: waited.append(seconds) or time_sleep(min(seconds, 0.1))
    )
    monkeypatch.setattr(MemberProcesses, "stop", refuse_once())
    run = start("import os, sys; sys.exit(os.environ['RAYTIDE_ATTEMPT'] == '1')", ONE, retries=1)
    run.result.result(60)
    assert waited.count(script_runner.ORPHANS_S) == 1


def test_an_elastic_script_takes_in_a_member_that_came_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_runner, "GROW_AFTER_S", 0.0)
    run = start(LEAVE, replace(TWO, members=(member(0), Member(1))))
    run.wait_for("at 1")
    run.platform.tell(replace(TWO, epoch=2))
    run.result.result(60)
    assert run.said.count("[1] at 2") == 1


def test_a_lease_that_is_over_ends_the_processes(start: Start) -> None:
    run = start(WAIT)
    run.wait_for("[1] at 2")
    run.platform.tell(LeaseLostError("job-1 is stopped"))
    assert isinstance(run.result.exception(60), LeaseLostError)
    assert all(process.poll() is not None for host in run.hosts for process in host.processes._running.values())


class Told:
    """A member that answers each call with the next of what it was given."""

    image = ""

    def __init__(self, **answers: list[object]) -> None:
        self.answers = answers

    def call(self, method: str, *args: object) -> Future[Any]:
        answer: Future[Any] = Future()
        given = self.answers[method].pop(0) if self.answers.get(method) else None
        if isinstance(given, Exception):
            answer.set_exception(given)
        elif method in self.answers:
            answer.set_result(given)
        return answer

    def kill(self) -> None:
        pass


IMAGE = "registry.example.com/train@sha256:12"


def test_the_record_of_a_script_has_the_digest_of_its_image(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "image", IMAGE)
    run = start("print('in it')", TWO)
    run.result.result(60)
    assert run.platform.progress["image"] == IMAGE
    assert run.platform.progress["stage"] == "attempt 1"


@pytest.mark.parametrize(
    ("error", "retries", "starts"),
    [
        (ConfigError("the image a.b/c cannot be used on n: manifest unknown."), 3, 1),
        (ImagePullError("the image a.b/c cannot be used on n: connection refused."), 0, 1),
        (ImagePullError("the image a.b/c cannot be used on n: connection refused."), 2, 3),
    ],
)
def test_an_image_that_does_not_exist_leaves_no_retry_and_a_registry_that_is_down_does(
    error: RaytideError, retries: int, starts: int
) -> None:
    """Neither counts as a lost node, for whose report the runner would wait."""
    spec = ScriptSpec.parse({"command": ["x"], "image": "registry.example.com/c", "retries": retries}, where="x")
    started: list[Told] = []

    def start(member: Member, shape: Shape) -> Told:
        started.append(Told(free_port=[error], stop=[None]))
        return started[-1]

    runner = ScriptRunner(spec, None, Platform(ONE), "job-1", start=start, say=lambda line: None)
    with pytest.raises(ScriptError, match=r"could not be started on node-0-0: the image a\.b/c cannot be used on n"):
        runner.run()
    assert len(started) == starts


def test_a_member_that_vanishes_after_all_have_ended_well_loses_nothing() -> None:
    done = [ProcessReport((), (ProcessExit(rank, 0, "", 0.0),)) for rank in range(2)]
    gone = Told(free_port=[1], start=[None], report=[done[0], ClusterError("gone")])
    late = Told(start=[None], report=[ProcessReport((), ()), done[1]])
    hosts = iter((gone, late))
    spec = ScriptSpec(command=("true",))
    attempt_ = script_attempt.Attempt(spec, SHAPE, TWO.members, lambda *_: next(hosts), print)
    assert attempt_.launch(None, {}) is None
    assert [attempt_.poll(), attempt_.poll()] == [None, None]
    assert attempt_.poll() == script_attempt.AttemptResult("done")


def test_the_last_line_is_printed_although_the_report_that_was_asked_for_ended_before_it() -> None:
    last = ProcessReport(((0, "saved"),), (ProcessExit(0, 143, "saved", 0.0),))
    told, said = Told(free_port=[1], start=[None], report=[ProcessReport((), ()), last], stop=[None]), list[str]()
    attempt = script_attempt.Attempt(ScriptSpec(command=("x",)), ONE.shape, ONE.members, lambda *_: told, said.append)
    assert attempt.launch(None, {}) is None
    assert attempt.poll() is None
    assert attempt.stop(0.0)
    assert said == ["saved"]


def test_what_a_member_s_method_raised_under_ray_is_its_own_and_all_else_a_lost_member() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    raised = OSError(28, "No space left on device")
    for error, expected in (
        (RayTaskError("start", "Traceback ...", raised, ip="127.0.0.1", proctitle="x").as_instanceof_cause(), OSError),
        (ActorDiedError(), ClusterError),
    ):
        answer, told = Future[Any](), Future[Any]()
        answer.set_exception(error)
        pass_on(told, answer)
        assert type(told.exception()) is expected
