"""Runs a script over a lease: in its job's driver process, on the head.

One attempt after another, each on the members that are there. A process that ends with an error ends the attempt, and
the job unless it has retries left; a lost or departing node ends the attempt too, and the next one costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from raytide.actors.gang.lease_watch import LeaseWatch, ProgressReporter, ready_members, settled_members
from raytide.actors.gang.member_actor import RayMemberActor, StartHost
from raytide.actors.gang.member_processes import NO_RIGHTS, Rights
from raytide.actors.gang.process_shim import ORPHAN_GRACE_S
from raytide.actors.gang.script_attempt import Attempt, AttemptResult, MemberKey, member_key
from raytide.core.clock import Clock, SystemClock
from raytide.core.errors import ScriptError
from raytide.core.objects.gang import Lease, MemberState
from raytide.core.objects.lease_client import LeaseClient
from raytide.core.specs.script import ScriptSpec

TICK_S = 0.05
LOST_WITHIN_S = 30.0
"""So long the platform may take to say that the node of vanished processes is lost; then it was their own doing."""
ORPHANS_S = ORPHAN_GRACE_S + 1.0
"""Nobody said that the last attempt's processes have ended: the next one would share their GPUs."""
GROW_AFTER_S = 60.0
"""No attempt is ended earlier for the sake of members that came back."""


def run_script(
    spec: ScriptSpec,
    package: object,
    client: LeaseClient,
    job_id: str,
    *,
    start: StartHost = RayMemberActor,
    say: Callable[[str], None] = print,
    clock: Clock | None = None,
    done: Mapping[str, float | int | str] | None = None,
    rights: Rights = NO_RIGHTS,
) -> None:
    """Run `spec` on the lease of `job_id` until it ends well; ScriptError when it does not, LeaseLostError when the
    lease is over. `package` is its working directory, packed, or a reference to that, or None;
    `done` what an earlier driver of the job reported, which this one goes on from; `rights` are its processes'.
    """
    runner = _Runner(spec, package, client, job_id, start, say, clock or SystemClock(), done or {}, rights)
    try:
        runner.run()
    finally:
        runner.close()


class _Runner:
    def __init__(
        self,
        spec: ScriptSpec,
        package: object,
        client: LeaseClient,
        job_id: str,
        start: StartHost,
        say: Callable[[str], None],
        clock: Clock,
        done: Mapping[str, float | int | str],
        rights: Rights,
    ) -> None:
        self._rights = rights
        self._spec, self._package, self._job_id = spec, package, job_id
        self._start, self._say, self._clock = start, say, clock
        self._watch, self._reporter = LeaseWatch(client, job_id), ProgressReporter(client, job_id)
        self._attempt: Attempt | None = None
        self._number = int(done.get("attempts", 0))
        self._failures = int(done.get("failures", 0))
        self._progress: dict[str, float | int | str] = {}

    def run(self) -> None:
        while True:
            attempt = self._attempt = self._gather()
            self._number += 1
            nodes = ", ".join(member.node_id for member in attempt.members)
            self._progress = {
                "stage": f"attempt {self._number}",
                "attempts": self._number,
                "failures": self._failures,
                "world": attempt.world,
                "nodes": nodes,
            }
            self._reporter.send(self._progress)
            ending = attempt.launch(self._package, self._environment()) or self._follow(attempt)
            grace_s = ending.grace_s if ending.kind == "moved" else self._spec.grace_s
            has_ended = attempt.end(grace_s, ending.seats)
            self._attempt = None
            if ending.kind == "done":
                return
            self._account(ending)
            if not has_ended:
                time.sleep(ORPHANS_S)

    def close(self) -> None:
        """Whatever ended the run: no process of it stays, and the driver may have only three seconds left itself."""
        if self._attempt is not None:
            self._attempt.end(grace_s=2.0)
        self._watch.close()
        self._reporter.close(self._progress, timeout_s=1.0)

    def _gather(self) -> Attempt:
        """Wait until the lease is active and no further member is on its way."""
        while True:
            lease = self._watch.latest()
            if lease is not None and (members := settled_members(lease)):
                return Attempt(self._spec, lease.shape, members, self._start, self._say, self._rights)
            time.sleep(TICK_S)

    def _follow(self, attempt: Attempt) -> AttemptResult:
        while True:
            lease = self._watch.latest()
            ending = attempt.look() or (None if lease is None else self._moved(attempt, lease))
            if ending is not None:
                return ending
            time.sleep(TICK_S)

    def _moved(self, attempt: Attempt, lease: Lease) -> AttemptResult | None:
        """Whether the lease has something else for the script than the members that it is on."""
        there = {member_key(member): member for member in lease.usable}
        gone = [member for member in attempt.members if member_key(member) not in there]
        if gone:
            seats = tuple(member_key(member) for member in gone)
            return AttemptResult("moved", f"{gone[0].node_id} is lost", seats=seats, grace_s=self._spec.grace_s)
        for seat in attempt.seats:
            leaves_at_s = there[seat].leaves_at_s
            if there[seat].state is MemberState.LEAVING and leaves_at_s is not None:
                left_s = leaves_at_s - self._clock.now_s()
                if left_s <= self._spec.grace_s:
                    why = f"{there[seat].node_id} has to be left"
                    return AttemptResult("moved", why, grace_s=max(0.0, min(self._spec.grace_s, left_s)))
        more = len(ready_members(lease)) - len(attempt.members)
        if more > 0 and time.monotonic() - attempt.started_s >= GROW_AFTER_S:
            return AttemptResult("moved", f"{more} more of its members are there", grace_s=self._spec.grace_s)
        return None

    def _account(self, ending: AttemptResult) -> None:
        if ending.kind == "moved" or (ending.kind == "lost" and self._is_lost(ending.seats)):
            self._say(f"raytide: {ending.why}; it is started again")
            return
        self._failures += 1
        if self._failures > self._spec.retries:
            tried = f" It was started {self._failures} times." if self._failures > 1 else ""
            text = f"{ending.why}.{tried}\n`raytide logs {self._job_id}` has all of its output"
            if ending.exit is not None:
                self._progress["exit_code"] = ending.exit.code
                raise ScriptError(f"{text}, which ended with:\n{ending.exit.tail}" if ending.exit.tail else f"{text}.")
            raise ScriptError(f"{text}.")
        self._say(f"raytide: {ending.why}")
        self._say(f"raytide: retry {self._failures} of {self._spec.retries}")

    def _is_lost(self, seats: tuple[MemberKey, ...]) -> bool:
        """Whether the platform finds so too: then it was the node's end."""
        deadline = time.monotonic() + LOST_WITHIN_S
        while time.monotonic() < deadline:
            lease = self._watch.latest()
            if lease is not None and not set(seats) <= {member_key(member) for member in lease.usable}:
                return True
            time.sleep(TICK_S)
        return False

    def _environment(self) -> dict[str, str]:
        """Libraries know by torchrun's names that processes are started for them."""
        torchrun = {"TORCHELASTIC_RUN_ID": self._job_id, "TORCHELASTIC_RESTART_COUNT": str(self._number - 1)}
        return {"RAYTIDE_JOB": self._job_id, "RAYTIDE_ATTEMPT": str(self._number), **torchrun, **self._spec.env}
