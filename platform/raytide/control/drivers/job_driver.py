"""The driver of a managed job: a process that Ray runs on the head.

`python -m raytide.control.drivers.job_driver RUN_DIR JOB`

The driver runs the job's trainer, dataset build or script, and calls the API with the job's token. A RaytideError
becomes the reason of the job's failure. After a failure of the cluster, such as a lost node or a restart of the API,
the driver exits and is started again.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from raytide.control.client import ApiClient
from raytide.control.supervision.log_rotation import bound_driver_log
from raytide.core.errors import ClusterError, DeniedError, RaytideError, WaitTimeoutError
from raytide.core.io.environment import all_passed
from raytide.core.io.private_paths import check_named, inherited_restriction, restrict_to
from raytide.core.io.token_dataset import sha256_of
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.gang import Lease, LeaseState, MemberState
from raytide.core.objects.job import Job, JobKind
from raytide.core.ray_internals import hush_node_deaths
from raytide.core.specs.data import DatasetVersionSpec, DataSpec
from raytide.core.specs.script import ScriptSpec
from raytide.core.specs.train import TrainSpec
from raytide.queue.lifecycle.jobs import WITHOUT_MEMBERS

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_POLL_S = 110.0
_DIED = 255
"""The exit code of a driver that is to be started again; exit codes of failed jobs are below 128 (see `ray_jobs`)."""


def train(job: Job, client: ApiClient, run_dir: Path) -> None:
    from raytide.actors.trainer.elastic.driver import run_train

    spec = TrainSpec.parse(job.spec.config, where=job.id)
    result = run_train(spec, client, job.id)
    done: dict[str, float | int | str] = {"first_loss": result.first_loss or 0.0, "loss": result.loss or 0.0}
    client.report(job.id, done if result.model_dir is None else {**done, "model": result.model_dir})


def data(job: Job, client: ApiClient, run_dir: Path) -> None:
    from raytide.pipelines.build import Progress, build

    spec = DataSpec.parse(job.spec.config, where=job.id)
    if spec.cleaning is not None and spec.cleaning.stages:
        require_own_user(job, run_dir)
    members = LeasedMembers(active_lease(client, job.id), client, job.id)
    report = Throttle(client, job.id)
    with Stall(spec.name, spec.stall_timeout_s) as stall:

        def on_progress(progress: Progress) -> None:
            stall.moved()
            report(progress.as_report())

        manifest = build(spec, members, on_progress)
    client.report(job.id, {"stage": "done", "documents": manifest.documents, "tokens": manifest.tokens})
    version = DatasetVersionSpec.of(manifest, sha256_of(spec.out), name=spec.name, location=spec.out, job=job.id)
    try:
        client.call("POST", "/v1/datasets", version.model_dump(mode="json", exclude={"team"}))
    except ClusterError:
        raise
    except RaytideError as error:  # the dataset is there all the same
        sys.stderr.write(f"raytide: the dataset is not registered: {error}\n")


def require_own_user(job: Job, run_dir: Path) -> None:
    """Raises DeniedError if the cluster's `run_as` names a user of the operating system for the team's code. Call this
    for a dataset build with stages. The stages are users' code, but they would run as raytide's user.
    """
    if load_cluster(run_dir / "cluster.yaml").settings.user_of(job.spec.team):
        raise DeniedError(
            f"{job.spec.name}: cleaning.stages run as raytide's user, and this cluster's run_as gives users' code "
            "another one.",
            hint="Run the functions in a script before the build (`raytide run`), or build where run_as is not set.",
        )


def script(job: Job, client: ApiClient, run_dir: Path) -> None:
    import ray

    from raytide.actors.gang.member_processes import Rights
    from raytide.actors.gang.script_runner import ScriptRunner

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_DIED))  # lets `finally` blocks end its processes
    spec = ScriptSpec.parse(job.spec.config, where=job.id)
    package = ray.put(client.package(spec.package)) if spec.package else None
    settings = load_cluster(run_dir / "cluster.yaml").settings
    rights = Rights(settings.user_of(job.spec.team), all_passed(settings.pass_environment), client.access)
    ScriptRunner(spec, package, client, job.id, done=job.progress, rights=rights).run()


class LeasedMembers:
    """The placement groups of a lease's usable members, kept up to date by a thread.

    Members that are about to leave are included only if no other members are left. If no member is usable, the process
    ends, because a new lease may take long. The process is later started again, and finished work is kept.
    """

    def __init__(self, lease: Lease, client: ApiClient, job_id: str) -> None:
        self._groups: dict[str, PlacementGroup] = {}
        self._update(lease)
        self._client, self._job_id = client, job_id
        threading.Thread(target=self._watch, args=(lease.epoch,), name="lease", daemon=True).start()

    def __call__(self) -> Mapping[str, PlacementGroup]:
        return self._groups

    def _update(self, lease: Lease) -> None:
        from raytide.actors.gang.placement_groups import placement_group_of

        staying = [member for member in lease.usable if member.state is MemberState.READY] or lease.usable
        known = self._groups
        self._groups = {
            member.placement_group_id: known.get(member.placement_group_id) or placement_group_of(member)
            for member in staying
        }

    def _watch(self, epoch: int) -> None:
        while True:
            try:
                lease = self._client.wait_lease(self._job_id, newer_than=epoch, timeout_s=_POLL_S)
            except ClusterError:
                time.sleep(random.uniform(0.1, 0.5))
                continue
            if not lease.usable:
                sys.stderr.write("no member is usable\n")
                sys.stderr.flush()
                os._exit(WITHOUT_MEMBERS)  # nothing else interrupts a main thread that waits in Ray
            self._update(lease)
            epoch = lease.epoch


DRIVERS: Mapping[JobKind, Callable[[Job, ApiClient, Path], None]] = {
    JobKind.TRAIN: train,
    JobKind.DATA: data,
    JobKind.SCRIPT: script,
}


class Stall:
    """A context that raises WaitTimeoutError if `moved` is not called for `timeout_s` seconds.

    It uses an alarm signal, because the main thread waits in Ray's code. Only one such context may be open, in the main
    thread.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        self._what, self._timeout_s = what, timeout_s

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGALRM, self._late)
        self.moved()
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._before)

    def moved(self) -> None:
        # Again and again: one alarm may come where its error is swallowed, or wake another thread than this one.
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s, self._timeout_s)

    def _late(self, number: int, frame: FrameType | None) -> None:
        raise WaitTimeoutError(
            f"{self._what} stalled: no progress for {self._timeout_s:g} s.",
            hint="See its logs for the cause, or raise stall_timeout_s.",
        )


class Throttle:
    """Reports a job's progress at most once a second. A new stage is reported at once."""

    def __init__(self, client: ApiClient, job_id: str) -> None:
        self._client, self._job_id = client, job_id
        self._last_s, self._stage = 0.0, ""

    def __call__(self, progress: Mapping[str, float | int | str]) -> None:
        stage = str(progress.get("stage", ""))
        if stage != self._stage or time.monotonic() - self._last_s >= 1.0:
            self._last_s, self._stage = time.monotonic(), stage
            with suppress(ClusterError):  # the API restarts; the next report includes this one
                self._client.report(self._job_id, progress)


def active_lease(client: ApiClient, job_id: str) -> Lease:
    """Waits without limit until the job's lease is active, and returns it. Raises LeaseLostError if the job is over."""
    epoch = -1
    while True:
        try:
            lease = client.wait_lease(job_id, newer_than=epoch, timeout_s=_POLL_S)
        except ClusterError:  # the API restarts; the lease stays
            time.sleep(random.uniform(0.1, 0.5))
            continue
        if lease.state is LeaseState.ACTIVE and lease.usable:
            return lease
        epoch = lease.epoch


def has_lost_members(job_id: str, client: ApiClient) -> bool:
    """Returns True if the job's lease is active but has no usable member. Its members were lost, or are being
    replaced."""
    with suppress(RaytideError):
        lease = client.wait_lease(job_id, newer_than=-1, timeout_s=0)
        return lease.state is LeaseState.ACTIVE and not lease.usable
    return False


def main(run_dir: str, job_id: str) -> int:
    import ray

    bound_driver_log()
    client = ApiClient.of_job(run_dir, job_id)
    gcs_address = json.loads((Path(run_dir) / "cluster.json").read_text())["gcs_address"]
    hush_node_deaths()
    restrict_to(load_cluster(Path(run_dir) / "cluster.yaml").settings.data_roots)
    ray.init(
        address=gcs_address,
        namespace="raytide",
        log_to_driver=False,
        logging_level=logging.WARNING,
        runtime_env=inherited_restriction(),
    )
    try:
        job = client.job(job_id).job
        if job.spec.kind is not JobKind.SCRIPT:  # scripts may run as another user
            check_named(job.spec.config, job.id, links=job.spec.kind is JobKind.TRAIN)
        DRIVERS[job.spec.kind](job, client, Path(run_dir))
    except ClusterError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return WITHOUT_MEMBERS if has_lost_members(job_id, client) else _DIED
    except RaytideError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        with suppress(RaytideError):  # a report that is refused, or that nobody takes, must not hide this error
            client.report(job_id, {"error": str(error)})
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
