"""Random deeds at random moments: of users, of clouds that take nodes back, and of whoever kills processes.

The seed decides the deeds and their order; what they meet is up to the machine, so a run repeats only roughly.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
from tests.soak import work
from tests.soak.users import Holder, hold_elsewhere

from raytide.autoscaler.providers.local.files import NodeFolder, node_folders
from raytide.autoscaler.providers.local.spot import give_notice, reclaim, set_stockouts
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster
from raytide.control.client import ApiClient
from raytide.core.errors import ClusterError
from raytide.core.io.process import Process, marked
from raytide.core.objects.job import JobSpec

POOLS = tuple((name, zone) for name in ("cpu2", "cpu1.spot") for zone in ("local-a", "local-b"))
MOST_ACTIVE = 5
"""More would only make the queue longer."""
RETRY_S = 60.0

T = TypeVar("T")


@dataclass(slots=True)
class Storm:
    cluster: LocalCluster
    config_path: Path
    corpus: work.Corpus
    chance: random.Random
    client: ApiClient
    done: Counter[str] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    holders: list[Holder] = field(default_factory=list)
    elsewhere: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Processes that hold a job's gang, by job."""
    spares_control: bool = False
    """True if controller, API and supervisor are left alone, so that they grow old enough to be measured."""

    def blow(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.deed()
            time.sleep(min(self.chance.uniform(0.1, 4.0), max(0.0, until - time.monotonic())))

    def deed(self) -> None:
        """Does one random deed, which returns what it did, or "nothing" if it found nothing to do it to."""
        deeds = {
            self.submit: 30,
            self.stop: 3,
            self.kill_holder: 8,
            self.kill_driver: 6,
            self.kill_replica: 6,
            self.take_node: 7,
            self.kill_raylet: 4,
            self.warn: 7,
            self.empty_pools: 4,
            self.fill_pools: 8,
        }
        if not self.spares_control:
            deeds |= {self.kill_controller: 12, self.kill_api: 6, self.kill_supervisor: 7}
        name = self.chance.choices([*deeds], [*deeds.values()])[0]()
        self.done[name] += 1

    def calm(self) -> None:
        """Nothing is killed, refused or held by force any more."""
        set_stockouts(self.cluster.run_dir, ())
        for process in self.elsewhere.values():
            process.kill()
            process.wait()

    def submit(self) -> str:
        if len(self._active()) >= MOST_ACTIVE:
            return "nothing"
        number = len(self.accepted)
        kind = self.chance.choices(("train", "data", "held gang", "killed gang"), (4, 2, 3, 3))[0]
        if kind == "train":
            self._accept(work.train(self.corpus, number, self.chance))
        elif kind == "data":
            self._accept(work.data(self.corpus, number))
        else:
            job_id = self._accept(work.gang(number, self.chance))
            if kind == "held gang":
                self.holders.append(Holder(self.client, job_id, self.chance.uniform(1.0, 15.0)))
            else:
                self.elsewhere[job_id] = hold_elsewhere(self.cluster, job_id)
        return f"{kind} submitted"

    def stop(self) -> str:
        active = self._active()
        if not active:
            return "nothing"
        job_id = self.chance.choice(active)
        self.stopped.add(job_id)
        self._surely(lambda: self.client.stop(job_id))
        return "job stopped"

    def kill_holder(self) -> str:
        alive = [process for process in self.elsewhere.values() if process.poll() is None]
        if not alive:
            return "nothing"
        victim = self.chance.choice(alive)
        victim.kill()
        victim.wait()
        return "gang's holder killed"

    def kill_controller(self) -> str:
        return self._kill("controller")

    def kill_api(self) -> str:
        return self._kill("api")

    def kill_supervisor(self) -> str:
        """Sometimes together with what it watches: nobody starts that again before the next `up`."""
        also = self.chance.choice(("", "controller", "api"))
        self._kill("supervisor")
        if also:
            self._kill(also)
            self.done[f"{also} killed"] += 1
        time.sleep(self.chance.uniform(0.0, 3.0))
        self.up()
        return "supervisor killed"

    def up(self) -> None:
        """As somebody would who finds that the supervisor is gone."""
        process = self.cluster.process("supervisor")
        assert process is None or process.wait(10.0)
        local.up(self.config_path, self.cluster.name)

    def kill_driver(self) -> str:
        return self._kill_one("raytide.control.drivers.job_driver", "driver killed")

    def kill_replica(self) -> str:
        return self._kill_one("ray::ServeReplica", "replica killed")

    def take_node(self) -> str:
        return self._at_a_node(lambda node: reclaim(self.cluster.run_dir, node.node_id), "node reclaimed")

    def kill_raylet(self) -> str:
        def kill(node: NodeFolder) -> None:
            for process in _below(node.process()):
                if "raylet/raylet" in _command(process):
                    process.kill()

        return self._at_a_node(kill, "raylet killed")

    def warn(self) -> str:
        deadline_s = time.time() + self.chance.uniform(1.0, 8.0)
        return self._at_a_node(lambda node: give_notice(self.cluster.run_dir, node.node_id, deadline_s), "notice given")

    def empty_pools(self) -> str:
        set_stockouts(self.cluster.run_dir, self.chance.sample(POOLS, self.chance.randint(1, len(POOLS))))
        return "pools emptied"

    def fill_pools(self) -> str:
        set_stockouts(self.cluster.run_dir, ())
        return "pools filled"

    def _kill(self, what: str) -> str:
        process = self.cluster.process(what)
        if process is None or not process.alive:
            return "nothing"
        process.send(signal.SIGKILL)
        return f"{what} killed"

    def _kill_one(self, named: str, what: str) -> str:
        found = [p for p in marked(MARK, self.cluster.cluster_id) if named in _command_of(p)]
        if not found:
            return "nothing"
        self.chance.choice(sorted(found, key=lambda process: process.pid)).send(signal.SIGKILL)
        return what

    def _at_a_node(self, act: Callable[[NodeFolder], None], what: str) -> str:
        live = [folder for folder in node_folders(self.cluster.run_dir) if folder.end() is None]
        if not live:
            return "nothing"
        act(self.chance.choice(live))
        return what

    def _active(self) -> list[str]:
        views = self._surely(lambda: self.client.jobs(limit=100))
        return sorted(view.job.id for view in views if not view.job.is_final and view.job.id not in self.stopped)

    def _accept(self, spec: JobSpec) -> str:
        """Submit until somebody says that it was accepted, under one key: it must be queued once."""
        key = f"{spec.name}-{self.chance.getrandbits(32):08x}"
        job_id = self._surely(lambda: self.client.submit(spec, key=key)).job.id
        self.accepted.append(job_id)
        return job_id

    def _surely(self, ask: Callable[[], T]) -> T:
        """The API may be dead for a moment."""
        deadline = time.monotonic() + RETRY_S
        while True:
            try:
                return ask()
            except ClusterError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)


def _below(process: Process | None) -> list[psutil.Process]:
    try:
        return [] if process is None else psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command_of(process: Process) -> str:
    try:
        return _command(psutil.Process(process.pid))
    except psutil.NoSuchProcess:
        return ""


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
