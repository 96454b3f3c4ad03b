"""One attempt at a script: its processes on some members of a gang, from their start until something ends them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from typing import Any, Literal

from raytide.actors.gang.member_actor import MemberActor, StartHost
from raytide.actors.gang.member_processes import NO_RIGHTS, ProcessExit, ProcessLaunch, ProcessReport, Rights
from raytide.core.errors import ClusterError
from raytide.core.objects.gang import Member, Shape
from raytide.core.specs.script import ScriptSpec

START_TIMEOUT_S = 120.0
PING_TIMEOUT_S = 10.0
SETTLE_S = 1.0
"""Ranks that lose a peer end with errors too: so long others may say that they were first."""
_REPORT_S = 1.0

MemberKey = tuple[int, int]
"""A member's index and incarnation."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """`lost`: a member's processes vanished, by no fault of the script's if its node did; `moved`: it has to leave."""

    kind: Literal["done", "failed", "lost", "moved"]
    why: str = ""
    exit: ProcessExit | None = None
    seats: tuple[MemberKey, ...] = ()
    """Whose processes vanished."""
    grace_s: float = 0.0
    """What those that are left may take to end."""


@dataclass(slots=True, eq=False)
class _MemberRun:
    member: Member
    host: MemberActor
    report: Future[ProcessReport] | None = None
    is_gone: bool = False


@dataclass(slots=True)
class Attempt:
    spec: ScriptSpec
    shape: Shape
    members: Sequence[Member]
    """The script's node rank is their order."""
    start_host: StartHost
    say: Callable[[str], None]
    rights: Rights = NO_RIGHTS
    started_s: float = field(default_factory=time.monotonic)
    _places: list[_MemberRun] = field(default_factory=list)
    _exits: dict[int, ProcessExit] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return len(self.members) * self.spec.processes(self.shape)

    @property
    def seats(self) -> frozenset[MemberKey]:
        return frozenset(member_key(member) for member in self.members)

    def launch(self, package: object, environment: dict[str, str]) -> AttemptResult | None:
        """Start every process; an Ending when a member cannot. `package`: its bytes or a reference to them."""
        self._places = [_MemberRun(member, self.start_host(member, self.shape)) for member in self.members]
        first = self._places[0]
        port = self._ask([first], "free_port", first.member.address)
        if isinstance(port, AttemptResult):
            return port
        meet = {"MASTER_ADDR": first.member.address, "MASTER_PORT": str(port[0])}
        started = self._ask(
            self._places,
            "start",
            package,
            each=lambda node_rank: self._launches(node_rank, {**environment, **meet}),
        )
        return started if isinstance(started, AttemptResult) else None

    def look(self) -> AttemptResult | None:
        """Pass on what was printed; how it ended, if it did."""
        lost = self._listen()
        has_failed = any(found.code for found in self._exits.values())
        if len(self._exits) == self.world and not has_failed:
            return AttemptResult("done")
        if lost:
            return self._vanished(lost)
        return self._judge() if has_failed else None

    def end(self, grace_s: float, gone: Sequence[MemberKey] = ()) -> bool:
        """Have all processes end, and pass on what they still print. `gone` are not asked. Whether all others said that
        they have ended; where not, their shims see to it within ORPHAN_GRACE_S."""
        for place in self._places:
            place.is_gone = place.is_gone or member_key(place.member) in gone
        stops = [place.host.call("stop", grace_s) for place in self._places if not place.is_gone]
        deadline = time.monotonic() + grace_s + SETTLE_S
        while time.monotonic() < deadline and wait_futures(stops, timeout=0.05).not_done:
            self._listen()
        if len(self._exits) < self.world:
            wait_futures([place.report for place in self._places if place.report], timeout=_REPORT_S)
            self._listen()
        for place in self._places:
            place.host.kill()
        return all(stop.done() and stop.exception() is None for stop in stops)

    def _launches(self, node_rank: int, environment: dict[str, str]) -> tuple[ProcessLaunch, ...]:
        """As torchrun names them."""
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
                self.spec.command,
                {**common, "RANK": str(rank), "ROLE_RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                self.rights,
            )
            for local_rank in range(local)
        )

    def _ask(
        self,
        places: Sequence[_MemberRun],
        method: str,
        *args: object,
        each: Callable[[int], object] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> list[Any] | AttemptResult:
        """Everybody's answer, or an Ending that names those who gave none, or an error."""
        more = [() if each is None else (each(number),) for number in range(len(places))]
        calls = [place.host.call(method, *args, *mine) for place, mine in zip(places, more, strict=True)]
        wait_futures(calls, timeout=timeout_s)
        lost = []
        for place, call in zip(places, calls, strict=True):
            error = call.exception() if call.done() else ClusterError("no answer")
            if isinstance(error, ClusterError):
                lost.append((place, _first_line(error)))
            elif error is not None:
                why = f"{type(error).__name__}: {_first_line(error)}".rstrip(".")
                return AttemptResult("failed", f"it could not be started on {place.member.node_id}: {why}")
        return self._vanished(lost) if lost else [call.result() for call in calls]

    def _listen(self) -> list[tuple[_MemberRun, str]]:
        """Those who are found to be gone, with why."""
        lost = []
        for place in self._places:
            if place.is_gone:
                continue
            if place.report is not None and place.report.done():
                if (error := place.report.exception()) is not None:
                    lost.append((place, _first_line(error)))
                    continue
                self._heard(place.report.result())
                place.report = None
            if place.report is None:
                place.report = place.host.call("report", _REPORT_S)
        return lost

    def _heard(self, report: ProcessReport) -> None:
        for rank, line in report.lines:
            self.say(f"[{rank}] {line}" if self.world > 1 else line)
        for found in report.exits:
            self._exits[found.rank] = found

    def _judge(self) -> AttemptResult:
        """A process ended with an error. Its own, or because it lost a peer whose node is dying?"""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and len(self._exits) < self.world:
            if lost := self._listen():
                return self._vanished(lost)
            time.sleep(0.02)
        answers = self._ask(self._places, "ping", timeout_s=PING_TIMEOUT_S)
        if isinstance(answers, AttemptResult):
            return answers
        first = min((found for found in self._exits.values() if found.code), key=lambda found: found.at_s)
        node = self.members[first.rank // self.spec.processes(self.shape)].node_id
        return AttemptResult("failed", f"rank {first.rank} on {node} ended with exit code {first.code}", exit=first)

    def _vanished(self, lost: Sequence[tuple[_MemberRun, str]]) -> AttemptResult:
        for place, _ in lost:
            place.is_gone = True
        place, why = lost[0]
        seats = tuple(member_key(place.member) for place, _ in lost)
        return AttemptResult("lost", f"the processes on {place.member.node_id} are gone: {why}", seats=seats)


def member_key(member: Member) -> MemberKey:
    return member.index, member.incarnation


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
