"""A Slurm cluster for tests: the real munged, slurmctld and several slurmd of this user, each a virtual machine on an
address of its own, 127.0.K.N."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raytide.control.bootstrap.loopback import ANY, claim

TOOLS = Path(sys.prefix) / "tools"
FIRST_K, LAST_K = 200, 239
PORTS, PORTS_PER_K = 8_600, 16
"""Those of K: the controller's, then that of each slurmd, which listens on all addresses. Below the ephemeral range."""
KILL_WAIT_S = 12


def find_slurm() -> Path:
    """Returns the folder of Slurm's programs."""
    folder = TOOLS / "slurm"
    if not (folder / "slurmctld").exists():
        pytest.skip("there is no Slurm here: `./dev setup` fetches it (Debian: slurmctld, slurmd, slurm-client, munge)")
    return folder


@dataclass(slots=True)
class SlurmCluster:
    """Machines n1, n2, ... with `cpus` each, in the partition `main`."""

    folder: Path
    k: int
    programs: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def address(self, n: int) -> str:
        return f"127.0.{self.k}.{n + 1}"

    def run(self, *command: str) -> str:
        """Returns the output of one of Slurm's commands."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        argv = [str(self.programs / command[0]), *command[1:]]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def section(self, node_type: str, **job: Any) -> dict[str, Any]:
        """Returns `metadata.raytide.slurm` with one node type."""
        return {
            "node_types": {node_type: {"partition": "main", **job}},
            "python": sys.executable,
            "bin": str(self.programs),
            "conf": str(self.conf),
            "poll_s": 0.5,
        }

    def job_ids(self) -> list[str]:
        """Returns the ids of the jobs that run."""
        return self.run("squeue", "--noheader", "--states=RUNNING", "--format=%i").split()

    def start(self, machines: int, cpus: int) -> None:
        self._munge()
        self.conf.write_text(self._settings(machines, cpus))
        self._daemon("slurmctld", "-D", "-c", "-f", str(self.conf))
        for n in range(1, machines + 1):
            (self.folder / f"spool.n{n}").mkdir()
            self._daemon("slurmd", "-D", "-N", f"n{n}", "-f", str(self.conf), "-d", str(self.programs / "slurmstepd"))
        deadline = time.monotonic() + 240
        while self._idle() != machines:
            assert all(daemon.poll() is None for daemon in self.daemons), self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def close(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(120)

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def _idle(self) -> int:
        try:
            return len(set(self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()))
        except AssertionError:
            return 0  # the controller is not up yet

    def _munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        files = {"key": key.name, "log": "munged.log", "pid": "munged.pid", "seed": "munged.seed"}
        paths = [f"--{name}-file={self.folder / file}" for name, file in files.items()]
        self._daemon("munged", "--foreground", "--force", f"--socket={self.folder / 'munge'}", *paths)
        while not (self.folder / "munge").exists():
            assert self.daemons[0].poll() is None, self.logs()
            time.sleep(0.05)

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}{len(self.daemons)}.log").open("ab") as log:
            argv = [str(self.programs / command[0]), *command[1:]]
            self.daemons.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def _settings(self, machines: int, cpus: int) -> str:
        folder = self.folder
        user = pwd.getpwuid(os.getuid()).pw_name
        lines: Sequence[str] = (
            "ClusterName=test",
            "SlurmctldHost=localhost(127.0.0.1)",
            f"SlurmctldPort={_port(self.k, 0)}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            f"AuthInfo=socket={folder / 'munge'}",
            f"PluginDir={next((TOOLS / 'usr' / 'lib').glob('*/slurm-wlm'))}",
            f"StateSaveLocation={folder / 'state'}",
            f"SlurmdSpoolDir={folder}/spool.%n",
            f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
            f"SlurmdPidFile={folder}/slurmd.%n.pid",
            f"PlugStackConfig={os.devnull}",
            "ProctrackType=proctrack/pgid",  # as with cgroups, a SIGTERM reaches the job's script alone
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SwitchType=switch/none",
            "SchedulerType=sched/builtin",
            "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "ReturnToService=2",
            f"KillWait={KILL_WAIT_S}",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
        )
        nodes = [
            f"NodeName=n{n} NodeHostname=localhost NodeAddr={self.address(n)} Port={_port(self.k, n)} CPUs={cpus}"
            for n in range(1, machines + 1)
        ]
        partitions = [
            "PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=UNLIMITED PriorityTier=1 GraceTime=20",
            "PartitionName=urgent Nodes=ALL State=UP MaxTime=UNLIMITED PriorityTier=10",
        ]
        return "\n".join([*lines, *nodes, *partitions]) + "\n"


@contextmanager
def slurm_cluster(folder: Path, *, machines: int, cpus: int) -> Iterator[SlurmCluster]:
    programs = find_slurm()
    ks = range(FIRST_K, LAST_K + 1)
    places = {k: [(ANY, _port(k, n)) for n in range(machines + 1)] for k in ks}
    k, held = claim(places)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o700)
    cluster = SlurmCluster(folder, k, programs)
    try:
        cluster.start(machines, cpus)
        yield cluster
    finally:
        cluster.close()
        held.close()


def _port(k: int, n: int) -> int:
    return PORTS + (k - FIRST_K) * PORTS_PER_K + n
