"""Runs a script on a lease, from the job's driver process on the head node.

One attempt follows another, each on the members that are ready at the time. If a process fails, the attempt ends, and
the job fails if no retries are left. If a node is lost or about to leave, the attempt ends as well, but no retry is
used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from raytide.actors.gang import packages
from raytide.actors.gang.lease_watch import LeaseWatch, ProgressReporter, ready_members, settled_members
from raytide.actors.gang.member_actor import RayMemberActor, StartActor
from raytide.actors.gang.member_processes import NO_RIGHTS, Rights
from raytide.actors.gang.process_shim import ORPHAN_GRACE_S
from raytide.actors.gang.script_attempt import Attempt, AttemptResult, MemberKey, member_key
from raytide.core.clock import Clock, SystemClock
from raytide.core.errors import ScriptError
from raytide.core.objects.gang import Lease, LeaseClient, MemberState
from raytide.core.specs.script import ATTEMPTS, FAILURES, ScriptSpec

TICK_S = 0.05
LOST_WITHIN_S = 30.0
"""The seconds within which the platform must report the node of vanished processes as lost; otherwise the processes
count as failed.
"""
ORPHANS_S = ORPHAN_GRACE_S + 1.0
"""The seconds to wait if it is not confirmed that the last attempt's processes have ended: the next attempt would share
their GPUs.
"""
MOST_TAKEN_PORTS = 3
"""The attempts that may end because another process had opened their port, before that counts as a failure."""
GROW_AFTER_S = 60.0
"""The least age, in seconds, of an attempt that is restarted to use members that came back."""


class ScriptRunner:
    """Runs a script on the lease of a job.

    `package` is the script's packed working directory, a Ray reference to it, or None. `done` is the progress that
    an earlier driver of the job reported. This driver continues to count from the numbers in `done`. `rights` are
    the rights of the script's processes.
    """

    def __init__(
        self,
        spec: ScriptSpec,
        package: object,
        client: LeaseClient,
        job_id: str,
        *,
        start: StartActor | None = None,
        say: Callable[[str], None] = print,
        clock: Clock | None = None,
        done: Mapping[str, float | int | str] | None = None,
        rights: Rights = NO_RIGHTS,
    ) -> None:
        done = done or {}
        if ATTEMPTS not in done and done.get("stage") == f"attempt {done.get('attempts')}":  # of earlier releases
            done = {**done, ATTEMPTS: done["attempts"], FAILURES: done.get("failures", 0)}
        self._rights = rights
        self._spec, self._package, self._job_id = spec, package, job_id
        self._start = start or partial(RayMemberActor, image=spec.image)
        self._say, self._clock = say, clock or SystemClock()
        self._watch, self._reporter = LeaseWatch(client, job_id), ProgressReporter(client, job_id)
        self._attempt: Attempt | None = None
        self._number, self._failures = _count(done.get(ATTEMPTS, 0)), _count(done.get(FAILURES, 0))
        self._taken_ports = 0
        self._progress: dict[str, float | int | str] = {}

    def run(self) -> None:
        """Runs the script and returns when it has succeeded. Raises ScriptError if the script fails. Raises
        LeaseLostError if the lease is over.
        """
        try:
            self._run_attempts()
        finally:
            self._close()

    def _run_attempts(self) -> None:
        while True:
            attempt = self._attempt = self._wait_for_members()
            self._number += 1
            nodes = ", ".join(member.node_id for member in attempt.members)
            self._progress = {
                "stage": f"attempt {self._number}",
                ATTEMPTS: self._number,
                FAILURES: self._failures,
                "world": attempt.world,
                "nodes": nodes,
            }
            self._reporter.send(self._progress)
            result = attempt.launch(self._package, self._environment())
            if result is None:
                if attempt.images:
                    self._progress["image"] = attempt.images
                    self._reporter.send(self._progress)
                result = self._wait_for_result(attempt)
            grace_s = result.grace_s if result.kind == "moved" else self._spec.grace_s
            has_ended = attempt.stop(grace_s, result.lost)
            self._attempt = None
            if result.kind == "done":
                return
            self._handle_result(result)
            if not has_ended:
                time.sleep(ORPHANS_S)

    def _close(self) -> None:
        """Ends all processes, quickly: the driver itself may have only three seconds left."""
        if self._attempt is not None:
            self._attempt.stop(grace_s=2.0)
        self._watch.close()
        self._reporter.close(self._progress, timeout_s=1.0)

    def _wait_for_members(self) -> Attempt:
        """Waits until the lease has enough ready members and no other is on its way, and returns an attempt on them."""
        while True:
            lease = self._watch.latest()
            if lease is not None and (members := settled_members(lease)):
                return Attempt(self._spec, lease.shape, members, self._start, self._say, self._rights)
            time.sleep(TICK_S)

    def _wait_for_result(self, attempt: Attempt) -> AttemptResult:
        while True:
            lease = self._watch.latest()
            result = attempt.poll() or (None if lease is None else self._move_result(attempt, lease))
            if result is not None:
                return result
            time.sleep(TICK_S)

    def _move_result(self, attempt: Attempt, lease: Lease) -> AttemptResult | None:
        """Returns a result if the script must move: members are lost or leave, or more are ready. Else returns None."""
        usable = {member_key(member): member for member in lease.usable}
        gone = [member for member in attempt.members if member_key(member) not in usable]
        if gone:
            keys = tuple(member_key(member) for member in gone)
            return AttemptResult("moved", f"{gone[0].node_id} is lost", lost=keys, grace_s=self._spec.grace_s)
        for key in attempt.member_keys:
            leaves_at_s = usable[key].leaves_at_s
            if usable[key].state is MemberState.LEAVING and leaves_at_s is not None:
                left_s = leaves_at_s - self._clock.now_s()
                if left_s <= self._spec.grace_s:
                    why = f"{usable[key].node_id} has to be left"
                    return AttemptResult("moved", why, grace_s=max(0.0, min(self._spec.grace_s, left_s)))
        more = len(ready_members(lease)) - len(attempt.members)
        if more > 0 and time.monotonic() - attempt.started_s >= GROW_AFTER_S:
            return AttemptResult("moved", f"{more} more of its members are there", grace_s=self._spec.grace_s)
        return None

    def _handle_result(self, result: AttemptResult) -> None:
        if result.kind == "moved" or (result.kind == "lost" and self._is_node_lost(result.lost)):
            self._say(f"raytide: {result.reason}; it is started again")
            return
        if result.kind == "port_taken" and self._taken_ports < MOST_TAKEN_PORTS:
            self._taken_ports += 1
            self._say(f"raytide: {result.reason}; it is started again with another")
            return
        self._failures += 1
        is_final = result.is_final or (
            result.exit is not None
            and (
                result.exit.code in self._spec.final_exit_codes
                or packages.is_final(self._spec.pip, result.exit.code, result.exit.tail)
            )
        )
        if is_final or self._failures > self._spec.retries:
            tried = f" It was started {self._failures} times." if self._failures > 1 else ""
            text = f"{result.reason}.{tried}\n`raytide logs {self._job_id}` has all of its output"
            if result.exit is not None:
                self._progress["exit_code"] = result.exit.code
                raise ScriptError(f"{text}, which ended with:\n{result.exit.tail}" if result.exit.tail else f"{text}.")
            raise ScriptError(f"{text}.")
        self._say(f"raytide: {result.reason}")
        self._say(f"raytide: retry {self._failures} of {self._spec.retries}")

    def _is_node_lost(self, keys: tuple[MemberKey, ...]) -> bool:
        """Waits for the platform to report the members as lost; returns whether it did."""
        deadline = time.monotonic() + LOST_WITHIN_S
        while time.monotonic() < deadline:
            lease = self._watch.latest()
            if lease is not None and not set(keys) <= {member_key(member) for member in lease.usable}:
                return True
            time.sleep(TICK_S)
        return False

    def _environment(self) -> dict[str, str]:
        """Returns the script's variables, with those of torchrun by which libraries recognize a launched process."""
        torchrun = {"TORCHELASTIC_RUN_ID": self._job_id, "TORCHELASTIC_RESTART_COUNT": str(self._number - 1)}
        return {"RAYTIDE_JOB": self._job_id, "RAYTIDE_ATTEMPT": str(self._number), **torchrun, **self._spec.env}


def _count(reported: float | int | str) -> int:
    """Returns a count of an earlier driver. Returns 0 if the script itself has reported a text under the same name."""
    return 0 if isinstance(reported, str) else max(0, int(reported))
