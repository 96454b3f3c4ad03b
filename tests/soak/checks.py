"""Checks of what must be true after a storm."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

import psutil
from tests.cluster_fixture import ray_nodes
from tests.soak.storm import Storm

from raytide.autoscaler.providers.local.files import MARK as NODE_MARK
from raytide.autoscaler.providers.local.files import node_folders
from raytide.autoscaler.providers.local.provider import NODE_ID_LABEL
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.bootstrap.wiring import local_provider
from raytide.control.drivers.ray_jobs import RayJobs
from raytide.core.io.process import marked
from raytide.core.objects.job import FINAL_STATES, Job, JobKind, JobState
from raytide.core.state import Store
from raytide.ledger.reconcile import bill, reconcile

SAMPLE_S = 2.0
YOUNG_S = 60.0
"""Until then a process still loads what it needs: of a controller, Ray Serve alone takes 90 MB, and on a busy machine
half a minute."""
MOST_MB, MOST_FDS = 30, 15
"""Most growth of an old process: caches fill, cycles wait for a garbage collection, leaks go on."""


def jobs_are_over_as_they_should(storm: Storm, store: Store) -> None:
    """Every accepted job is there once, with one end and a reason; only those that were disturbed on purpose failed."""
    jobs = {job.id: job for job in store.jobs(limit=10_000)}
    assert sorted(jobs) == sorted(storm.accepted)
    assert [job.id for job in jobs.values() if not job.is_final] == []
    assert [job.id for job in jobs.values() if not job.reason and job.state is not JobState.SUCCEEDED] == []
    ends = {
        job_id: [e.to_state for e in store.events(job_id, limit=1000) if e.to_state in FINAL_STATES] for job_id in jobs
    }
    assert {job_id: states for job_id, states in ends.items() if states != [jobs[job_id].state]} == {}
    wrong = [f"{job.id} {job.state}: {job.reason}" for job in jobs.values() if not _is_as_expected(job, storm)]
    assert wrong == []


def _ends(store: Store, job_id: str) -> list[str]:
    return [event.to_state for event in store.events(job_id, limit=1000) if event.to_state in FINAL_STATES]


def _is_as_expected(job: Job, storm: Storm) -> bool:
    if job.state is JobState.STOPPED:
        return job.id in storm.stopped
    if job.id in storm.elsewhere:
        return job.state is JobState.FAILED and "has not asked for its lease" in job.reason
    return job.state is JobState.SUCCEEDED


def nothing_was_started_twice(cluster: LocalCluster, store: Store) -> None:
    joined = Counter(node_id for node in ray_nodes(cluster) if (node_id := node["labels"].get(NODE_ID_LABEL)))
    assert [node_id for node_id, times in joined.items() if times > 1] == []
    drivers = RayJobs(cluster.dashboard_url, cluster.run_dir, cluster.ray_headers)
    attempts = defaultdict(set)
    for key, status in drivers.statuses().items():
        assert status.state != "running", key
        attempts[key.job_id].add(key.attempt)
    drivers.close()
    for job in store.jobs(limit=10_000):
        if job.spec.kind is JobKind.GANG:
            assert job.id not in attempts
        else:
            assert attempts[job.id] <= set(range(job.restarts + 1)), job.id


def machines_are_the_records(cluster: LocalCluster, store: Store) -> None:
    """And none of them runs on, as a machine or as a process."""
    machines = local_provider(cluster).machines()
    bought = [node for node in store.nodes(limit=10_000) if node.started_at_s is not None]
    assert sorted(machine.node_id for machine in machines) == sorted(node.id for node in bought)
    assert {m.node_id: m.ended_at_s for m in machines} == {node.id: node.ended_at_s for node in bought}
    assert [machine.node_id for machine in machines if machine.ended_at_s is None] == []
    left = {folder.node_id: marked(NODE_MARK, folder.mark) for folder in node_folders(cluster.run_dir)}
    assert {node_id: processes for node_id, processes in left.items() if processes} == {}


def the_ledger_is_the_bill(cluster: LocalCluster, store: Store) -> int:
    """The bill in micro-dollars."""
    machines = local_provider(cluster).machines()
    entries = store.books.entries()
    assert reconcile(machines, entries) == ()
    billed = sum(bill(machine) for machine in machines)
    assert sum(entry.amount_micro_usd for entry in entries) == billed > 0
    return billed


@dataclass(frozen=True, slots=True)
class Sample:
    age_s: float
    mb: float
    fds: int


class Meter(threading.Thread):
    """Measures the memory and files of controller and API, over each of their lives."""

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(name="meter", daemon=True)
        self._cluster = cluster
        self._over = threading.Event()
        self._lives: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
        self.start()

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for what in ("controller", "api"):
                self._look(what)

    def close(self) -> None:
        self._over.set()
        self.join()

    def oldest(self, what: str) -> tuple[Sample, Sample]:
        """The longest life of it: when it was no longer young, and at its end."""
        lives = [life for (name, _), life in self._lives.items() if name == what]
        longest = max(lives, key=lambda life: life[-1].age_s)
        return next((s for s in longest if s.age_s >= YOUNG_S), longest[-1]), longest[-1]

    def _look(self, what: str) -> None:
        process = self._cluster.process(what)
        try:
            if process is None or not process.alive:
                return
            seen = psutil.Process(process.pid)
            with seen.oneshot():
                sample = Sample(time.time() - seen.create_time(), seen.memory_info().rss / 2**20, seen.num_fds())
        except psutil.Error:
            return
        self._lives[(what, process.pid)].append(sample)


def nobody_grew(meter: Meter) -> None:
    for what in ("controller", "api"):
        young, old = meter.oldest(what)
        assert old.mb - young.mb <= MOST_MB, (what, young, old)
        assert old.fds - young.fds <= MOST_FDS, (what, young, old)
