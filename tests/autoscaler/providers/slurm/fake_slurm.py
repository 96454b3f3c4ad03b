"""A Slurm in memory, behind the interface of its commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raytide.autoscaler.providers.slurm.queue import SlurmJob
from raytide.core.clock import Clock
from raytide.core.errors import ClusterError, ProviderError


class FakeSlurm:
    """Jobs wait until `start`. While it `is_down` nothing is answered; `loses_answers` submits and raises."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.listed: dict[str, SlurmJob] = {}
        self.scripts: dict[str, str] = {}
        self.arguments: dict[str, Sequence[str]] = {}
        self.cancelled: list[str] = []
        self.interrupted: list[str] = []
        self.is_down = self.loses_answers = False
        self.refusal = ""

    def jobs(self) -> list[SlurmJob]:
        self._check()
        return list(self.listed.values())

    def submit(self, arguments: Sequence[str], script: str) -> str:
        self._check()
        if self.refusal:
            raise ProviderError(self.refusal)
        job_id = str(len(self.listed) + 1)
        comment = next(each for each in arguments if each.startswith("--comment=")).partition("=")[2]
        self.listed[job_id] = SlurmJob(job_id, "PENDING", None, None, "", "Resources", comment)
        self.scripts[job_id], self.arguments[job_id] = script, arguments
        if self.loses_answers:
            raise ClusterError("sbatch did not answer.")
        return job_id

    def cancel(self, job_id: str) -> None:
        self._check()
        self.cancelled.append(job_id)
        self.move(job_id, "CANCELLED")

    def interrupt(self, job_id: str) -> None:
        self._check()
        self.interrupted.append(job_id)

    def kill_wait_s(self) -> float:
        return 30.0

    def start(self, job_id: str, *, limit_s: float | None = None) -> None:
        now_s = self.clock.now_s()
        end_s = None if limit_s is None else now_s + limit_s
        self.listed[job_id] = replace(
            self.listed[job_id], state="RUNNING", start_s=now_s, end_s=end_s, machine=f"n{job_id}"
        )

    def move(self, job_id: str, state: str) -> None:
        self.listed[job_id] = replace(self.listed[job_id], state=state)

    def _check(self) -> None:
        if self.is_down:
            raise ClusterError("Slurm does not answer: Unable to contact slurm controller")
