"""One attempt to run a script: its processes on some members of a gang, from their start until an event ends the
attempt.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from typing import Any, Literal

from raytide.actors.gang.images import PREPARE_TIMEOUT_S, ImagePullError
from raytide.actors.gang.member_actor import MemberActor, StartActor, first_line
from raytide.actors.gang.member_processes import NO_RIGHTS, ProcessExit, ProcessLaunch, ProcessReport, Rights
from raytide.actors.gang.packages import with_packages
from raytide.core.errors import ClusterError, ConfigError
from raytide.core.objects.gang import Member, Shape
from raytide.core.specs.script import ScriptSpec

START_TIMEOUT_S = 120.0
PING_TIMEOUT_S = 10.0
SETTLE_S = 1.0
"""The seconds to wait after a failure for the report of an earlier one that caused it: ranks that lose a peer fail as
well.
"""
_REPORT_S = 1.0

MemberKey = tuple[int, int]
"""A member's index and incarnation."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The reason why an attempt ended. `lost` means that a member's processes vanished, perhaps because its node died.
    `moved` means that the script must start again on other members. `port_taken` means that another process had opened
    the port at which the ranks meet.
    """

    kind: Literal["done", "failed", "lost", "moved", "port_taken"]
    reason: str = ""
    exit: ProcessExit | None = None
    lost: tuple[MemberKey, ...] = ()
    """The members whose processes vanished."""
    grace_s: float = 0.0
    """The seconds that the remaining processes get between SIGTERM and SIGKILL."""
    is_final: bool = False
    """True if another attempt would fail in the same way."""


@dataclass(slots=True, eq=False)
class _MemberRun:
    member: Member
    actor: MemberActor
    report: Future[ProcessReport] | None = None
    is_lost: bool = False


@dataclass(slots=True)
class Attempt:
    spec: ScriptSpec
    shape: Shape
    members: Sequence[Member]
    """The members in the order of the script's node ranks."""
    start_actor: StartActor
    say: Callable[[str], None]
    rights: Rights = NO_RIGHTS
    started_s: float = field(default_factory=time.monotonic)
    _runs: list[_MemberRun] = field(default_factory=list)
    _exits: dict[int, ProcessExit] = field(default_factory=dict)
    _port: str = ""

    @property
    def world(self) -> int:
        return len(self.members) * self.spec.processes(self.shape)

    @property
    def images(self) -> str:
        """The images in which the processes run, named by their digests. There is only one, unless different members
        resolved the job's image tag to different images.
        """
        return ", ".join(sorted({run.actor.image for run in self._runs} - {""}))

    @property
    def member_keys(self) -> frozenset[MemberKey]:
        return frozenset(member_key(member) for member in self.members)

    def launch(self, package: object, environment: dict[str, str]) -> AttemptResult | None:
        """Starts every process and returns None. If a member cannot start its processes, returns the attempt's result.
        `package` is the packed working directory as bytes, a Ray reference to these bytes, or None.
        """
        self._runs = [_MemberRun(member, self.start_actor(member, self.shape)) for member in self.members]
        first = self._runs[0]
        timeout_s = START_TIMEOUT_S + (0.0 if self.spec.image is None else PREPARE_TIMEOUT_S)
        port = self._call_all([first], "free_port", timeout_s=timeout_s)
        if isinstance(port, AttemptResult):
            return port
        self._port = str(port[0])
        meet = {"MASTER_ADDR": first.member.address, "MASTER_PORT": self._port}
        started = self._call_all(
            self._runs,
            "start",
            package,
            each=lambda node_rank: self._launches(node_rank, {**environment, **meet}),
            timeout_s=timeout_s,
        )
        return started if isinstance(started, AttemptResult) else None

    def poll(self) -> AttemptResult | None:
        """Prints new output. Returns the result if the attempt is over, otherwise None."""
        lost = self._collect_reports()
        has_failed = any(exited.code for exited in self._exits.values())
        if len(self._exits) == self.world and not has_failed:
            return AttemptResult("done")
        if lost:
            return self._lost_result(lost)
        return self._failure_result() if has_failed else None

    def stop(self, grace_s: float, lost: Sequence[MemberKey] = ()) -> bool:
        """Ends all processes and prints their last output. Members in `lost` are skipped.

        Returns whether all other members confirmed the end of their processes. If a member did not confirm, its
        processes end within ORPHAN_GRACE_S seconds: each runs under a parent process (process_shim.py) that ends it.
        """
        for run in self._runs:
            run.is_lost = run.is_lost or member_key(run.member) in lost
        stops = [run.actor.call("stop", grace_s) for run in self._runs if not run.is_lost]
        deadline = time.monotonic() + grace_s + SETTLE_S
        while time.monotonic() < deadline and wait_futures(stops, timeout=0.05).not_done:
            self._collect_reports()
        self._collect_last_reports()
        for run in self._runs:
            run.actor.kill()
        return all(stop.done() and stop.exception() is None for stop in stops)

    def _launches(self, node_rank: int, environment: dict[str, str]) -> tuple[ProcessLaunch, ...]:
        """Returns the processes to start on one member, with torchrun's variables."""
        local = self.spec.processes(self.shape)
        common = {
            **({"OMP_NUM_THREADS": "1"} if local > 1 else {}),
            **environment,
            "WORLD_SIZE": str(self.world),
            "ROLE_WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(node_rank),
            "GROUP_WORLD_SIZE": str(len(self.members)),
        }
        return tuple(
            ProcessLaunch(
                rank := node_rank * local + local_rank,
                with_packages(self.spec.pip, self.spec.command),
                {**common, "RANK": str(rank), "ROLE_RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                self.rights,
            )
            for local_rank in range(local)
        )

    def _call_all(
        self,
        runs: Sequence[_MemberRun],
        method: str,
        *args: object,
        each: Callable[[int], object] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> list[Any] | AttemptResult:
        """Calls a method on all members. Returns their answers or, if a member is lost or its call failed, the
        attempt's result.
        """
        more = [() if each is None else (each(number),) for number in range(len(runs))]
        calls = [run.actor.call(method, *args, *own) for run, own in zip(runs, more, strict=True)]
        wait_futures(calls, timeout=timeout_s)
        lost = []
        for run, call in zip(runs, calls, strict=True):
            error = call.exception() if call.done() else ClusterError("no answer")
            if isinstance(error, ClusterError) and not isinstance(error, ImagePullError):
                lost.append((run, first_line(error)))
            elif error is not None:
                name = "" if isinstance(error, ConfigError | ImagePullError) else f"{type(error).__name__}: "
                why = f"it could not be started on {run.member.node_id}: {name}{first_line(error)}".rstrip(".")
                return AttemptResult("failed", why, is_final=isinstance(error, ConfigError))
        return self._lost_result(lost) if lost else [call.result() for call in calls]

    def _collect_reports(self) -> list[tuple[_MemberRun, str]]:
        """Reads the reports that have arrived. Returns the members that are lost, each with the reason."""
        lost = []
        for run in self._runs:
            if run.is_lost:
                continue
            if run.report is not None and run.report.done():
                if (error := run.report.exception()) is not None:
                    lost.append((run, first_line(error)))
                    continue
                self._record_report(run.report.result())
                run.report = None
            if run.report is None:
                run.report = run.actor.call("report", _REPORT_S)
        return lost

    def _collect_last_reports(self) -> None:
        """Reads reports until they tell of each process's end, for at most _REPORT_S. One report may not be enough: it
        may have ended just before its process printed its last line.
        """
        deadline = time.monotonic() + _REPORT_S
        asked = [run for run in self._runs if run.report is not None and not run.is_lost]
        while asked and len(self._exits) < self.world and (left_s := deadline - time.monotonic()) > 0:
            reports = [run.report for run in asked if run.report is not None]
            wait_futures(reports, timeout=left_s, return_when=FIRST_COMPLETED)
            lost = [run for run, _ in self._collect_reports()]
            asked = [run for run in asked if run not in lost and not self._has_ended(run)]

    def _has_ended(self, run: _MemberRun) -> bool:
        """Returns whether all processes of a member are reported to have ended."""
        local, node_rank = self.spec.processes(self.shape), self._runs.index(run)
        return all(rank in self._exits for rank in range(node_rank * local, (node_rank + 1) * local))

    def _record_report(self, report: ProcessReport) -> None:
        for rank, line in report.lines:
            self.say(f"[{rank}] {line}" if self.world > 1 else line)
        for exited in report.exits:
            self._exits[exited.rank] = exited

    def _failure_result(self) -> AttemptResult:
        """Returns the result after a process failed: `failed`, or `lost` if a peer's node died first."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and len(self._exits) < self.world:
            if lost := self._collect_reports():
                return self._lost_result(lost)
            time.sleep(0.02)
        answers = self._call_all(self._runs, "ping", timeout_s=PING_TIMEOUT_S)
        if isinstance(answers, AttemptResult):
            return answers
        first = min((exited for exited in self._exits.values() if exited.code), key=lambda exited: exited.at_s)
        node = self.members[first.rank // self.spec.processes(self.shape)].node_id
        opener = self._exits.get(0)
        if opener is not None and opener.code and _has_found_taken(self._port, opener.tail):
            reason = f"another process has opened port {self._port} of {self.members[0].node_id}"
            return AttemptResult("port_taken", reason, exit=opener)
        return AttemptResult("failed", f"rank {first.rank} on {node} ended with exit code {first.code}", exit=first)

    def _lost_result(self, lost: Sequence[tuple[_MemberRun, str]]) -> AttemptResult:
        for run, _ in lost:
            run.is_lost = True
        run, why = lost[0]
        seats = tuple(member_key(run.member) for run, _ in lost)
        return AttemptResult("lost", f"the processes on {run.member.node_id} are gone: {why}", lost=seats)


def _has_found_taken(port: str, output: str) -> bool:
    """Returns whether a process's last output says that this port was not free."""
    is_taken = "EADDRINUSE" in output or "address already in use" in output.lower()
    return is_taken and re.search(rf"\b{port}\b", output) is not None


def member_key(member: Member) -> MemberKey:
    return member.index, member.incarnation
