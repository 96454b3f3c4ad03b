"""Runs Slurm's own commands `sbatch`, `squeue`, `scancel` and `scontrol`. The commands run as the user that runs the
head.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from raytide.core.errors import ClusterError, ProviderError
from raytide.core.objects.hardware.slurm import SlurmSection

_TIMEOUT_S = 20.0
_FORMAT = "%i|%T|%S|%e|%N|%r|%k"
_UNREACHABLE = ("Unable to contact slurm controller", "Connection refused", "timed out", "Zero Bytes were transmitted")
"""Parts of Slurm's errors if its controller does not answer, which says nothing about the job."""
_STARTED = frozenset(("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"))
_ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    )
)
_KILL_WAIT_S = 30.0
"""Slurm's default of KillWait, in seconds."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job, as `squeue` lists it."""

    job_id: str
    state: str
    """The state as Slurm names it, such as RUNNING."""
    start_s: float | None
    end_s: float | None
    """The time at which Slurm will end the job: its time limit, or the end of a preemption's grace time. None without
    either.
    """
    machine: str
    why_pending: str
    comment: str

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED

    @property
    def has_started(self) -> bool:
        """True while the job holds a machine that Slurm has not begun to reclaim."""
        return self.state in _STARTED

    @property
    def is_ending(self) -> bool:
        """True between Slurm's SIGTERM and Slurm's SIGKILL, which comes KillWait seconds later. A requeue, a
        cancellation or the time limit causes the SIGTERM.
        """
        return self.state == "COMPLETING"


class SlurmQueue(Protocol):
    """The Slurm jobs of this user. A call raises ClusterError if Slurm does not answer, and ProviderError if Slurm
    refuses.
    """

    def jobs(self) -> list[SlurmJob]:
        """Returns the jobs that Slurm lists. Slurm still lists a job for some minutes after its end."""

    def submit(self, arguments: Sequence[str], script: str) -> str:
        """Submits a job and returns its id."""

    def cancel(self, job_id: str) -> None:
        """Makes Slurm end the job, with SIGTERM first and SIGKILL after KillWait."""

    def interrupt(self, job_id: str) -> None:
        """Sends SIGINT to the job's script, and to none of the script's child processes."""

    def kill_wait_s(self) -> float:
        """Returns Slurm's KillWait: the seconds between SIGTERM and SIGKILL."""


class SlurmCommands:
    """The queue of a real Slurm cluster, through Slurm's commands."""

    def __init__(self, section: SlurmSection) -> None:
        self._bin = Path(section.bin).expanduser() if section.bin else None
        kept = ("HOME", "PATH", "USER", "LOGNAME", "SHELL", "LANG", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
        self._environment = {name: os.environ[name] for name in kept if name in os.environ}  # no SBATCH_*, no secrets
        self._environment["SLURM_TIME_FORMAT"] = "%s"
        if self._bin is not None:  # jobs have this environment too
            self._environment["PATH"] = f"{self._bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        if section.conf:
            self._environment["SLURM_CONF"] = str(Path(section.conf).expanduser())

    def jobs(self) -> list[SlurmJob]:
        return parse_jobs(self._run(["squeue", "--me", "--noheader", "--states=all", f"--format={_FORMAT}"]))

    def submit(self, arguments: Sequence[str], script: str) -> str:
        output = self._run(["sbatch", "--parsable", *arguments], script)
        job_id = output.strip().splitlines()[-1].partition(";")[0] if output.strip() else ""
        if not job_id.isdigit():
            raise ProviderError(f"sbatch answered {output[-200:]!r} instead of a job's id.")
        return job_id

    def cancel(self, job_id: str) -> None:
        self._run(["scancel", "--quiet", job_id])

    def interrupt(self, job_id: str) -> None:
        self._run(["scancel", "--quiet", "--batch", "--signal=INT", job_id])

    def kill_wait_s(self) -> float:
        found = re.search(r"^KillWait\s*=\s*(\d+)", self._run(["scontrol", "show", "config"]), re.MULTILINE)
        return float(found[1]) if found else _KILL_WAIT_S

    def _run(self, argv: Sequence[str], text: str = "") -> str:
        program = str(self._bin / argv[0]) if self._bin is not None else argv[0]
        try:
            done = subprocess.run(
                [program, *argv[1:]],
                input=text,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                env=self._environment,
                check=False,
            )
        except FileNotFoundError:
            raise ClusterError(
                f"there is no {program} here.",
                hint="Install Slurm's client on the head, or set metadata.raytide.slurm.bin.",
            ) from None
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{argv[0]} did not answer within {_TIMEOUT_S:g} s.", hint="Is slurmctld up?") from None
        if done.returncode == 0:
            return done.stdout
        said = done.stderr.strip().replace("\n", "; ") or f"exit code {done.returncode}"
        if any(text in said for text in _UNREACHABLE):
            raise ClusterError(f"Slurm does not answer: {said}", hint="Is slurmctld up (`scontrol ping`)?")
        raise ProviderError(f"Slurm refused {argv[0]}: {said}", hint=f"Try `{argv[0]}` by hand as this user.")


def parse_jobs(output: str) -> list[SlurmJob]:
    """Returns the jobs in the output of `squeue`, which must have the format `_FORMAT`."""
    found = []
    for line in output.splitlines():
        parts = line.strip().split("|", 6)
        if len(parts) == 7:
            job_id, state, start, end, machine, why, comment = parts
            found.append(SlurmJob(job_id, state, _time(start), _time(end), machine, why, comment))
    return found


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() else None
