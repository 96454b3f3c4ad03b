"""The provider that uses Slurm jobs as nodes. A launch submits a job that starts a raylet. Slurm decides when and where
the job runs.

The comment of a job names its node, so a new controller finds each job again and submits no job twice. A node is billed
from the start of its job. Slurm reclaims a job's machine by a requeue, a preemption, a cancellation or the time limit.
`squeue` shows each of these events before the machine is lost. The event serves as the node's interruption notice.
"""

from __future__ import annotations

import shlex
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from raytide.autoscaler.providers.base import Machine, Notice, Provider
from raytide.autoscaler.providers.hosts.provider import HostCluster
from raytide.autoscaler.providers.poll import PollWatcher
from raytide.autoscaler.providers.purchases import PurchaseRecord, Purchases, in_order
from raytide.autoscaler.providers.slurm.queue import SlurmJob, SlurmQueue
from raytide.core.clock import Clock
from raytide.core.errors import ClusterError, ProviderError, RaytideError
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.objects.hardware.slurm import SlurmSection
from raytide.core.objects.node import Node, NodeType

SLURM_FOLDER = "slurm"
"""The subfolder of the run folder with the purchases, and by default with the requests and logs of nodes."""
NODE_PROGRAM = "raytide.autoscaler.providers.slurm.node"
_LEAVE_S = 15.0
"""The time that a node has to leave after SIGINT, before its job is cancelled."""


def job_arguments(section: SlurmSection, node_type: NodeType, comment: str, output: str) -> list[str]:
    """Returns the options of `sbatch` for one node."""
    return [
        f"--job-name=raytide-{node_type.name}",
        f"--comment={comment}",
        "--nodes=1",
        "--ntasks=1",
        "--export=ALL",
        f"--output={output}",
        *section.node_types[node_type.name].arguments(node_type),
    ]


def job_script(section: SlurmSection, request_file: str) -> str:
    return f"#!/bin/sh\nexec {section.python} -m {NODE_PROGRAM} {shlex.quote(request_file)}\n"


class SlurmProvider(Provider):
    """A provider that uses jobs of a Slurm cluster as nodes. `run_dir` is the cluster's run folder.

    If `starts_nodes` is False, the provider cancels jobs that have not started.
    """

    def __init__(
        self,
        section: SlurmSection,
        node_types: Iterable[NodeType],
        cluster: HostCluster,
        run_dir: Path,
        clock: Clock,
        queue: SlurmQueue,
        *,
        starts_nodes: bool = True,
    ) -> None:
        self._section, self._cluster, self._clock, self._queue = section, cluster, clock, queue
        self._types = {node_type.name: node_type for node_type in node_types}
        self._starts_nodes = starts_nodes
        self._purchases = Purchases(run_dir / SLURM_FOLDER / "purchases")
        shared = Path(section.folder).expanduser() if section.folder else run_dir / SLURM_FOLDER
        self._folder = shared / cluster.cluster_id
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._jobs: dict[str, list[SlurmJob]] = {}
        """The jobs of each node when the queue was last read, oldest first."""
        self._looked_s: float | None = None
        self._failure: ClusterError | None = None
        self._leaving_s: dict[str, float] = {}
        """The time at which each node that was given up got its signal."""
        self._cancelled: set[str] = set()
        self._ending_s: dict[str, float] = {}
        """First sight of the end of each job that Slurm takes back."""
        self._kill_wait_s: float | None = None
        self._watcher: PollWatcher | None = None

    def launch(self, node: Node, node_type: NodeType) -> None:
        """Submits the node's job, unless it was submitted before. The caller repeats the call while the job waits in
        Slurm's queue.
        """
        with self._lock:
            if self._purchases.find(node.id) is not None:
                return
            job = self._job(node.id)
            if job is None:
                self._look()  # a submission whose answer was lost
                job = self._job(node.id)
            if job is None:
                self._submit(node, node_type)
            elif job.has_ended:
                raise ProviderError(f"Slurm's job {job.job_id} ended before it was a node: {self._why(node.id, job)}")

    def terminate(self, node_id: str) -> None:
        """Asks the node's job to end, by a signal. A job that does not end in time is cancelled. The node has ended
        once its job has ended.
        """
        with self._lock:
            self._look_if_due()
            self._request_file(node_id).unlink(missing_ok=True)
            jobs = self._jobs.get(node_id, [])
            for job in jobs:
                if job.has_started and node_id not in self._leaving_s:
                    self._leaving_s[node_id] = self._clock.now_s()
                    self._queue.interrupt(job.job_id)
            self._cancel_strays(node_id, jobs)

    def machines(self) -> tuple[Machine, ...]:
        """Returns the nodes whose jobs have started, ended nodes included."""
        with self._lock:
            self._look_if_due()
            for node_id, jobs in self._jobs.items():
                self._adopt(node_id, jobs)
            live = []
            for purchase in self._purchases.open():
                found = self._job(purchase.node_id)
                if found is not None and (found.has_started or found.is_ending):
                    live.append(purchase.machine(found.machine))
                else:
                    self._end(purchase.node_id, self._why(purchase.node_id, found))
            for node_id, jobs in self._jobs.items():
                self._cancel_strays(node_id, jobs)
            return in_order([*self._purchases.over(), *live])

    def notices(self) -> tuple[Notice, ...]:
        """Returns notices for jobs that Slurm is ending, and for jobs whose time limit is near."""
        with self._lock:
            now_s, wall_ahead_s, found = self._clock.now_s(), self._clock.wall_ahead_s(), []
            for purchase in self._purchases.open():
                job = self._job(purchase.node_id)
                if job is None or self._is_given_up(purchase.node_id):
                    continue
                if job.is_ending:
                    since_s = self._ending_s.setdefault(purchase.node_id, now_s)
                    found.append(Notice(purchase.node_id, since_s + self._wait_s() + wall_ahead_s))
                elif job.end_s is not None and job.end_s - (now_s + wall_ahead_s) <= self._section.notice_s:
                    found.append(Notice(purchase.node_id, job.end_s))
            return tuple(found)

    def problems(self) -> tuple[str, ...]:
        """Returns one sentence, which says how many nodes wait in Slurm's queue and gives Slurm's reasons. Returns an
        empty tuple if no node waits.
        """
        with self._lock:
            waiting = Counter(
                jobs[0].why_pending
                for jobs in self._jobs.values()
                if jobs and not (jobs[0].has_started or jobs[0].has_ended or jobs[0].is_ending)
            )
        count = sum(waiting.values())
        reasons = ", ".join(f"{reason} ({number})" for reason, number in sorted(waiting.items()))
        return (f"{count} node{'s' * (count > 1)} in Slurm's queue: {reasons}.",) if waiting else ()

    def watch(self, on_change: Callable[[], None]) -> None:
        """Reads Slurm's queue every `poll_s` seconds, in a thread of its own, so that ticks do not wait for Slurm."""
        self._watcher = PollWatcher("slurm", self._section.poll_s, self._look_in_background, on_change)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()

    def _submit(self, node: Node, node_type: NodeType) -> None:
        self._purchases.check_room()
        request = self._cluster.join_request(node.id, node_type, node.zone)
        request |= {"cluster_id": self._cluster.cluster_id, "price_micro_usd_h": node.price_micro_usd_h}
        file = self._request_file(node.id)
        write_json(file, request)
        arguments = job_arguments(self._section, node_type, self._comment(node.id), str(self._log_file(node.id)))
        job_id = self._queue.submit([f"--chdir={self._folder}", *arguments], job_script(self._section, str(file)))
        self._jobs[node.id] = [SlurmJob(job_id, "PENDING", None, None, "", "None", self._comment(node.id))]

    def _adopt(self, node_id: str, jobs: list[SlurmJob]) -> None:
        """Records the start of the node's job: from now on the node is billed."""
        job = next((job for job in jobs if job.has_started), None)
        if job is None or self._purchases.find(node_id) is not None:
            return
        request = read_json(self._request_file(node_id))
        if request is None:
            return
        now_s = self._clock.now_s()
        started_at_s = now_s if job.start_s is None else min(job.start_s, now_s)
        self._purchases.record(
            PurchaseRecord(node_id, request["node_type"], request["zone"], request["price_micro_usd_h"], started_at_s)
        )

    def _cancel_strays(self, node_id: str, jobs: list[SlurmJob]) -> None:
        """Cancels second jobs of a node, and the job of a node that was given up, once that job has had its time to
        leave.
        """
        is_given_up = self._is_given_up(node_id)
        has_time = self._clock.now_s() < self._leaving_s.get(node_id, 0.0) + _LEAVE_S
        for job in jobs:
            is_stray = job is not jobs[0] or (is_given_up and not has_time)
            is_left = job.has_ended or job.is_ending or job.job_id in self._cancelled
            if not is_left and (is_stray or not (job.has_started or self._starts_nodes)):
                self._queue.cancel(job.job_id)
                self._cancelled.add(job.job_id)

    def _is_given_up(self, node_id: str) -> bool:
        """Returns whether the node is not wanted any more. A node that runs needs no request: its file may have been
        cleaned up, or lie in a folder that is not mounted now.
        """
        runs = self._purchases.find(node_id) is not None and not self._purchases.is_over(node_id)
        return node_id in self._leaving_s or not (runs or self._request_file(node_id).exists())

    def _end(self, node_id: str, reason: str) -> None:
        self._purchases.end(node_id, self._clock.now_s(), reason)
        self._ending_s.pop(node_id, None)
        self._request_file(node_id).unlink(missing_ok=True)

    def _why(self, node_id: str, job: SlurmJob | None) -> str:
        """Returns why a node no longer has a machine, with the last line that its job wrote."""
        if self._is_given_up(node_id):
            return "terminated"
        if job is None:
            return "Slurm does not know its job any more"
        how = f"Slurm job {job.job_id}: {job.state if job.has_ended else 'requeued'}"
        try:
            lines = [line.strip() for line in self._log_file(node_id).read_text(errors="replace").splitlines()]
        except OSError:
            lines = []
        last = next((line for line in reversed(lines) if line), "")
        return f"{how}: {last[-500:]}" if last else how

    def _job(self, node_id: str) -> SlurmJob | None:
        jobs = self._jobs.get(node_id)
        return jobs[0] if jobs else None

    def _look_in_background(self) -> object:
        try:
            self._look()
        except RaytideError:
            return None  # the next tick reports it
        with self._lock:
            return {(job.job_id, job.state, job.end_s) for jobs in self._jobs.values() for job in jobs}

    def _look_if_due(self) -> None:
        """Reads the queue if the last reading is too old. Raises the error if reading failed."""
        if self._looked_s is None or self._clock.now_s() - self._looked_s > 3 * self._section.poll_s:
            self._look()
        if self._failure is not None:
            raise self._failure

    def _look(self) -> None:
        try:
            listed, failure = self._queue.jobs(), None
        except (ClusterError, ProviderError) as error:
            listed, failure = None, ClusterError(error.message, hint=error.hint)
        with self._lock:
            self._looked_s, self._failure = self._clock.now_s(), failure
            if listed is None:
                assert failure is not None
                raise failure
            found: dict[str, list[SlurmJob]] = {}
            single = [job for job in listed if job.job_id.isdigit()]  # 12_3 and 12+0 are parts of the user's own jobs
            for job in sorted(single, key=lambda each: (each.has_ended, int(each.job_id))):
                head, _, node_id = job.comment.rpartition(":")
                if head == self._comment("").removesuffix(":") and node_id:
                    found.setdefault(node_id, []).append(job)
            self._jobs = found

    def _wait_s(self) -> float:
        if self._kill_wait_s is None:
            self._kill_wait_s = self._queue.kill_wait_s()
        return self._kill_wait_s

    def _comment(self, node_id: str) -> str:
        return f"raytide:{self._cluster.cluster_id}:{node_id}"

    def _request_file(self, node_id: str) -> Path:
        """Returns the file that the job reads. It exists from the submission until the node is given up or over."""
        return self._folder / f"{node_id}.json"

    def _log_file(self, node_id: str) -> Path:
        return self._folder / f"{node_id}.log"
