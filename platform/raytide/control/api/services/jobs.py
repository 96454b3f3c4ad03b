"""The API's operations on jobs, without HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from raytide.actors.trainer.run_log.curve import CurveReaders, RunCurves
from raytide.control.api.auth import ANY_TEAM, Caller
from raytide.control.api.services.input_check import Inputs
from raytide.control.api.services.leases import LeasePolls
from raytide.control.api.services.limits import LimitsService
from raytide.control.api.services.logs import job_log
from raytide.control.api.services.submission_rate import SubmissionRate
from raytide.control.api.services.uploads import Packages
from raytide.control.drivers.ray_jobs import RayJobs
from raytide.control.views import JobView, Live, LogPart, Waiting, WhyView
from raytide.core import bounds
from raytide.core.clock import Clock
from raytide.core.errors import ConflictError, DeniedError, UsageError
from raytide.core.io.working_dir import MOST_BYTES
from raytide.core.money import month_of, to_us
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.objects.gang import GangSpec, Lease, LeaseState
from raytide.core.objects.hardware.resources import resolve_accelerator
from raytide.core.objects.hardware.transfer import DataInput
from raytide.core.objects.job import BudgetPer, Job, JobKind, JobSpec, JobState
from raytide.core.objects.ledger_entry import EntryKind
from raytide.core.objects.node import PROVIDER_LABEL, NodeType
from raytide.core.objects.plan import UNMANAGED
from raytide.core.specs.data import DataSpec
from raytide.core.specs.script import FLOW_RUN, ScriptSpec
from raytide.core.specs.train import TrainSpec
from raytide.core.state import Store
from raytide.core.telemetry.job_trace import StepTraces
from raytide.ledger.report import accrued, costs, rate_micro_usd_h
from raytide.queue.lifecycle.pending_reason import given_away_text
from raytide.queue.lifecycle.submission import LearnedCorrections, plan_training, resolve_deadline, select_gpu_memory
from raytide.scheduling.diagnosis import check_possible

_ALL = 2**31 - 1


class JobService:
    """Submits, shows and changes jobs, and serves the jobs' drivers.

    Each method reads the store a few times and writes to it at most once, except that stopping a flow writes once per
    stage.
    """

    def __init__(
        self,
        store: Store,
        config: ClusterConfig,
        drivers: RayJobs,
        clock: Clock,
        live: Callable[[], Live],
        inputs: Inputs,
        accounts: LimitsService,
        packages: Packages,
        rate: SubmissionRate,
    ) -> None:
        self._store, self._config, self._drivers, self._clock, self._live = store, config, drivers, clock, live
        self._inputs, self._accounts, self._packages = inputs, accounts, packages
        self.leases = LeasePolls(store, clock)
        self._curves = CurveReaders()
        self._rate = rate
        self._steps = StepTraces(config.settings.tracing)
        self.learned = LearnedCorrections(store, config.node_types, self._config_of, clock)

    def submit(self, body: Mapping[str, object], caller: Caller, key: str | None, digest: str | None = None) -> JobView:
        """Queues a job and returns its view. `digest` identifies the request. The default is a digest of the spec."""
        spec = JobSpec.parse({"team": caller.home, **body}, where="job")
        caller.require_team(spec.team)
        self._accounts.check_team(spec.team)
        self._accounts.check_priority(spec.priority)
        now_s = self._clock.now_s()
        digest = digest or hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
        gang = at_one_provider(self._with_accelerator_labels(spec.gang), self._config.node_types)
        spec = spec.model_copy(update={"gang": gang})
        gang = select_gpu_memory(spec.gang, self._config.node_types, subject=f"{spec.kind} job {spec.name}")
        spec = spec.model_copy(update={"gang": gang})
        train = TrainSpec.parse(spec.config, where=spec.name) if spec.kind is JobKind.TRAIN else None
        if train is not None:
            spec, train = plan_training(
                spec,
                train,
                self._config.node_types,
                lambda train: self._inputs.training_config(train, caller),
                self.learned.current,
            )
            spec = spec.model_copy(update={"gang": self._with_inputs(spec, train, caller)})
        check_possible(spec.gang, self._config.node_types, subject=f"{spec.kind} job {spec.name}")
        self._check_config(spec, train, caller)
        spec = resolve_deadline(spec, self._config.node_types, now_s)
        self._rate.take(spec)
        most = self._config.settings.max_live_jobs
        job = self._store.submit_job(spec, caller.user, now_s, key=key, digest=digest, most_live=most)
        return self.view(job)

    def _config_of(self, spec: TrainSpec, job: Job) -> Mapping[str, object] | None:
        """Returns the `config.json` of the model that a job trained; None if the job's team may not read it."""
        return self._inputs.training_config(spec, Caller(user=job.user, team=job.spec.team))

    def _with_accelerator_labels(self, gang: GangSpec) -> GangSpec:
        types = self._config.node_types
        shapes = [
            shape.model_copy(update={"labels": resolve_accelerator(shape.labels, types)}) for shape in gang.shapes
        ]
        return gang.model_copy(update={"shapes": tuple(shapes)})

    def _with_inputs(self, spec: JobSpec, train: TrainSpec, caller: Caller) -> GangSpec:
        """Returns the gang of a training with the inputs that each member reads: a slice of each dataset, and the
        whole initial model."""
        named = any(shape.inputs for shape in spec.gang.shapes)
        if self._config.settings.transfer is None or named:
            return spec.gang
        sizes = self._inputs.training_inputs(train, caller)
        for url in set(train.datasets) - sizes.keys():
            if size := self._store.datasets.bytes_at(url, spec.team):
                sizes[url] = size

        def read(url: str, members: int) -> DataInput:
            return DataInput(url=url, gb=sizes[url] / (1 if url == train.init_from else members) / 1e9)

        shapes = [
            shape.model_copy(update={"inputs": tuple(read(url, shape.members) for url in sorted(sizes))})
            for shape in spec.gang.shapes
        ]
        return spec.gang.model_copy(update={"shapes": tuple(shapes)})

    def page(self, caller: Caller, limit: int, offset: int, *, active: bool = False) -> list[JobView]:
        """Returns at most `limit` jobs, newest first. `active` selects unfinished jobs. If specs are large, fewer jobs
        are returned.
        """
        team = caller.only_team
        most_bytes = bounds.MOST_PAGE_BYTES
        jobs = self._store.jobs(active=active, team=team, limit=limit, offset=offset, most_bytes=most_bytes)
        return self._views(jobs)

    def job(self, job_id: str, caller: Caller) -> JobView:
        return self.view(self._owned(job_id, caller))

    def stop(self, job_id: str, caller: Caller) -> JobView:
        """Requests the end of a job. A flow's process ends its stages; while it has none, they are ended here."""
        job = caller.acting_on(self._store.job(job_id))
        stopped = self._store.request_stop(job_id)
        if (run := flow_run(job)) and not job.is_final and not self._has_process(job):
            for stage in self._store.census.with_key(f"{run}-", job.user, job.spec.team):
                self._store.request_stop(stage)
        return self.view(stopped)

    def _has_process(self, job: Job) -> bool:
        lease = self._store.lease_of(job.id)
        return job.state is JobState.RUNNING and lease is not None and bool(lease.usable)

    def retry(self, job_id: str, caller: Caller, key: str | None) -> JobView:
        """Submits the spec of an ended job again. A deadline that has passed is dropped.

        Training continues from the last checkpoint, because `out` is the same. Raises ConflictError for a job that has
        not ended.
        """
        job = caller.acting_on(self._store.job(job_id))
        if not job.is_final:
            raise ConflictError(f"{job_id} is {job.state}.", hint=f"Stop it first: `raytide stop {job_id}`.")
        is_late = job.spec.due_at_s is not None and job.spec.due_at_s <= self._clock.now_s()
        body = job.spec.model_dump(mode="json") | ({"deadline": None} if is_late else {})
        return self.submit(body, caller, key, digest=f"retry of {job_id}")

    def why(self, job_id: str, caller: Caller) -> WhyView:
        """Returns why a job waits or why it ended.

        For the id `unmanaged`, it returns why unmanaged work (Ray work without a lease) waits.
        """
        if job_id == UNMANAGED:
            found = self._live().waiting.get(UNMANAGED, Waiting("", "no work without a lease is waiting."))
            return WhyView(UNMANAGED, None, None, found.constraint, found.reason, found.remedy, None)
        view = self.view(self._owned(job_id, caller))
        job, waits = view.job, view.waiting
        if waits is None or job.is_final:
            given = "" if view.lease is None else given_away_text(view.lease)
            reason = f"{job.reason}; {given}" if given else job.reason
            return WhyView(job.id, job.state, view.position, "", reason, "", None, view.stance, view.data)
        details = (waits.constraint, waits.reason, waits.remedy, waits.wait_s)
        return WhyView(job.id, job.state, view.position, *details, view.stance, view.data)

    def set_budget(self, job_id: str, caller: Caller, usd: float | None, *, soft: bool, per: BudgetPer) -> JobView:
        """Sets the job's budget. None removes it."""
        job = self._owned(job_id, caller)
        self._rate.take_change(job.spec.team)
        return self.view(self._accounts.set_job_budget(job.id, usd, soft=soft, per=per))

    def logs(self, job_id: str, caller: Caller, after: str, tail: int | None) -> LogPart:
        """Returns a part of the job's log. With `tail`, the part has the last `tail` lines. Otherwise the part begins
        at the position `after`.

        An empty `after` means the beginning of the log.
        """
        job = self._owned(job_id, caller)
        if job.spec.kind is JobKind.GANG:
            raise UsageError(
                f"{job_id} is a gang: its driver logs where it was started.",
                hint="Use `ray job logs` for a driver under `ray job submit`.",
            )
        return job_log.part(self._drivers, job, after if tail is None else job_log.tail(self._drivers, job, tail))

    def curves(self, job_id: str, caller: Caller, points: int) -> RunCurves:
        """Returns the logged values of a training run. They are empty before the run's first step."""
        job = self._owned(job_id, caller)
        if job.spec.kind is not JobKind.TRAIN:
            raise UsageError(f"{job_id} is a {job.spec.kind} job.", hint="Name a training job: only those log steps.")
        return self._curves.read(str(job.spec.config["out"]), points)

    def package(self, digest: str, caller: Caller) -> Path:
        """Returns the path of an uploaded package. A caller with a team's token may read only packages that an
        unfinished job of the team uses. Raises DeniedError if such a caller asks for another package. Raises
        NotFoundError if the package is gone.
        """
        if caller.team != ANY_TEAM and digest not in self._digests_in_use(caller.team):
            raise DeniedError(
                f"no unfinished job of team {caller.team} uses package {digest[:12]}.",
                hint="Submit the script again: `raytide run` uploads it.",
            )
        return self._packages.path(digest)

    def make_room(self, caller: Caller, announced: int | None) -> None:
        """Frees space for a package of `announced` bytes. None means the largest size that is allowed."""
        size = MOST_BYTES if announced is None else min(announced, MOST_BYTES)
        self._packages.make_room(self._digests_in_use(), caller.home, size)

    def _digests_in_use(self, team: str | None = None) -> set[str]:
        jobs = self._store.jobs(active=True, team=team, limit=_ALL)
        return {str(job.spec.config["package"]) for job in jobs if job.spec.config.get("package")}

    def report(self, job_id: str, caller: Caller, progress: Mapping[str, object]) -> None:
        job = caller.acting_on(self._store.job(job_id))
        known = {name: value for name, value in progress.items() if isinstance(value, int | float | str)}
        if invalid := sorted(progress.keys() - known.keys()):
            raise UsageError(
                f"progress {invalid[0]!r} of {job_id} is neither a number nor text.", hint="Report a number or text."
            )
        if huge := [name for name, value in known.items() if isinstance(value, int) and value.bit_length() > 63]:
            raise UsageError(f"progress {huge[0]!r} of {job_id} needs more than 64 bits.", hint="Report less.")
        self._store.report(job_id, known, self._clock.now_s())
        self._steps.on_report(job, known, self._clock.now_s())

    def release(self, job_id: str, caller: Caller, error: str) -> None:
        caller.acting_on(self._store.job(job_id))
        self._store.release(job_id, error=bounds.shortened(error))

    def lease(self, job_id: str, caller: Caller) -> Lease:
        """Returns the job's lease. While the job waits in the queue, the lease is WAITING with epoch -1. Raises
        LeaseLostError if the job is over or is being stopped.
        """
        return self.leases.lease(caller.acting_on(self._store.job(job_id)))

    def view(self, job: Job) -> JobView:
        return self._views((job,))[0]

    def _views(self, jobs: tuple[Job, ...]) -> list[JobView]:
        """Returns the views of jobs. The number of reads is independent of their number and of the queue's length."""
        ids = [job.id for job in jobs]
        live = self._live()
        positions = {job_id: place for place, job_id in enumerate(live.queue, start=1)}
        leases = self._store.census.leases(ids)
        intervals = self._store.books.intervals()
        pending = accrued(intervals, to_us(self._clock.now_s()))
        spent = costs(self._store.books.booked("job", only=ids), pending, "job")
        monthly = [job.id for job in jobs if job.spec.budget_per == "month"]
        in_month = self._store.books.spent(monthly, month_of(to_us(self._clock.now_s()))).jobs_month if monthly else {}
        views = []
        for job in jobs:
            lease = leases.get(job.id) if job.state is not JobState.QUEUED else None
            waiting = live.waiting.get(job.id) or (live.waiting.get(lease.id) if lease else None)
            if waiting is not None and waiting.constraint == "starting" and lease is not None and _is_whole(lease):
                waiting = None  # the controller observed before the last member was ready
            views.append(
                JobView(
                    job=job,
                    position=positions.get(job.id) if job.state is JobState.QUEUED else None,
                    cost_micro_usd=spent.get(job.id, 0),
                    price_micro_usd_h=round(rate_micro_usd_h(intervals, EntryKind.JOB, job.id)),
                    lease=lease,
                    waiting=waiting,
                    stance=None if job.is_final else live.stances.get(job.id),
                    data="" if job.is_final else live.data.get(job.id, ""),
                    month_micro_usd=in_month.get(job.id, 0) if job.spec.budget_per == "month" else None,
                )
            )
        return views

    def _owned(self, job_id: str, caller: Caller) -> Job:
        job = self._store.job(job_id)
        caller.require_team(job.spec.team)
        return job

    def _check_config(self, spec: JobSpec, train: TrainSpec | None, caller: Caller) -> None:
        """Rejects a job with an invalid configuration or a missing dataset before it is queued."""
        if spec.kind is not JobKind.SCRIPT:
            self._inputs.check_private(spec.config, spec.name, is_checked_later=True)
        if train is not None:
            self._config.settings.check_packages(train.pip, spec.team, spec.name)
            names = ", ".join(_nccl_paths(train))[:200]
            code = f"the library that nccl's {names} may name" if names else None
            self._config.settings.check_code(code, spec.team, spec.name, "Leave it out of nccl.")
            self._config.settings.check_image(train.image, spec.team, spec.name)
            self._inputs.check_training(train, caller)
        elif spec.kind is JobKind.DATA:
            self._inputs.check_build(DataSpec.parse(spec.config, where=spec.name))
        elif spec.kind is JobKind.SCRIPT:
            script = ScriptSpec.parse(spec.config, where=spec.name)
            self._config.settings.check_image(script.image, spec.team, spec.name)
            if script.package:
                self._packages.path(script.package)


def at_one_provider(gang: GangSpec, node_types: Iterable[NodeType]) -> GangSpec:
    """Returns the gang with a changed placement rule: all members of a shape must be at one provider. A shape that sets
    `together` keeps its own rule. In a cluster with one provider, the gang is not changed.

    Collectives between clouds or regions take many times as long, and their traffic costs money.
    """
    if not any(node_type.provider for node_type in node_types):
        return gang
    shapes = [
        shape.model_copy(update={"together": PROVIDER_LABEL}) if shape.members > 1 and not shape.together else shape
        for shape in gang.shapes
    ]
    return gang.model_copy(update={"shapes": tuple(shapes)})


def _nccl_paths(train: TrainSpec) -> list[str]:
    """Returns the settings of NCCL that may name a library, which the ranks would load, or a file."""
    return sorted(name for name, value in train.nccl.items() if "PLUGIN" in name or "/" in value)


def flow_run(job: Job) -> str:
    """Returns the run id of a flow's job, with which the keys of its stages' jobs begin; empty for any other job."""
    env = job.spec.config.get("env") if job.spec.kind is JobKind.SCRIPT else None
    return str(env.get(FLOW_RUN, "")) if isinstance(env, dict) else ""


def _is_whole(lease: Lease) -> bool:
    return lease.state is LeaseState.ACTIVE and all(each.is_usable or each.is_parked for each in lease.members)
