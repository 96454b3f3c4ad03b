"""What the API does, without HTTP: it checks requests against fleet and caller, and joins records into views."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from raytide.actors.serving.engines import choose_engine
from raytide.autoscaler.endpoints.load_target import cold_start_s
from raytide.autoscaler.providers.base import Bill
from raytide.control.accounting.cost_report import cost_report
from raytide.control.api.auth import ANY_TEAM, Caller
from raytide.control.api.health import HealthMonitor
from raytide.control.api.services import logs
from raytide.control.api.services.input_check import Inputs
from raytide.control.api.services.leases import Leases
from raytide.control.api.services.limits import Accounts
from raytide.control.api.services.metrics import samples
from raytide.control.api.services.submission_rate import SubmissionRate
from raytide.control.api.services.uploads import Packages
from raytide.control.ray_jobs import RayJobs
from raytide.control.reconcile.snapshot_request import request_snapshot
from raytide.control.views import (
    ClusterStatus,
    CostReport,
    CostTable,
    EndpointStatus,
    JobView,
    Live,
    LogPart,
    TeamView,
    Waiting,
    WhyView,
)
from raytide.core import bounds
from raytide.core.clock import Clock
from raytide.core.errors import ConfigError, ConflictError, DeniedError, UsageError
from raytide.core.io.working_dir import MOST_BYTES
from raytide.core.metrics import render
from raytide.core.money import month_of, to_us
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Shape
from raytide.core.objects.job import BudgetPer, Job, JobKind, JobSpec, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind
from raytide.core.objects.plan import UNMANAGED
from raytide.core.objects.resources import resolve_accelerator
from raytide.core.specs.data import DataSpec
from raytide.core.specs.script import ScriptSpec
from raytide.core.specs.train import TrainSpec
from raytide.core.state import Store
from raytide.jobs.lifecycle.deadline_check import resolve_deadline
from raytide.jobs.lifecycle.pending_reason import given_away_text
from raytide.ledger.cost import accrued, costs, rate_micro_usd_h
from raytide.ledger.report import By, rates
from raytide.scheduling.state import check_possible

_ALL = 2**31 - 1


class ApiService:
    """One per API process. Every method is a few reads and at most one write of the store."""

    def __init__(
        self,
        store: Store,
        config: ClusterConfig,
        bill: Bill,
        drivers: RayJobs,
        clock: Clock,
        live: Path,
        serve_url: str,
        ray_url: str,
        ray_environment: Mapping[str, str],
    ) -> None:
        self._store, self._config, self._bill, self._drivers = store, config, bill, drivers
        self._clock, self._live_path = clock, live
        self._serve_url, self._ray_url = serve_url, ray_url
        self._ray_environment = ray_environment
        self._inputs = Inputs()
        self.leases = Leases(store, clock)
        self._intake = SubmissionRate()
        self.accounts = Accounts(store, config)
        self.watch = HealthMonitor(live, store, clock)
        self.packages = Packages(live.parent / "packages")

    # Jobs.

    def submit(self, body: Mapping[str, object], caller: Caller, key: str | None, digest: str | None = None) -> JobView:
        """`digest`: of the request, where the body alone does not tell two apart."""
        spec = JobSpec.parse({"team": caller.home, **body}, where="job")
        caller.require_team(spec.team)
        self.accounts.check_team(spec.team)
        self._check_priority(spec.priority)
        spec = spec.model_copy(update={"gang": self._on_known_accelerators(spec.gang)})
        check_possible(spec.gang, self._config.node_types, subject=f"{spec.kind} job {spec.name}")
        self._check_config(spec, caller)
        now_s = self._clock.now_s()
        digest = digest or hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
        spec = resolve_deadline(spec, self._config.node_types, now_s)
        self._intake.take(spec)
        most = self._config.settings.max_live_jobs
        job = self._store.submit_job(spec, caller.user, now_s, key=key, digest=digest, most_live=most)
        return self.view(job)

    def _on_known_accelerators(self, gang: GangSpec) -> GangSpec:
        types = self._config.node_types
        shapes = [
            shape.model_copy(update={"labels": resolve_accelerator(shape.labels, types)}) for shape in gang.shapes
        ]
        return gang.model_copy(update={"shapes": tuple(shapes)})

    def jobs(self, caller: Caller, limit: int, offset: int, *, active: bool = False) -> list[JobView]:
        """Newest first; `active`: those that are not over. Fewer than `limit` when their specs are large."""
        team = caller.only_team
        most_bytes = bounds.MOST_PAGE_BYTES
        jobs = self._store.jobs(active=active, team=team, limit=limit, offset=offset, most_bytes=most_bytes)
        return self._views(jobs)

    def job(self, job_id: str, caller: Caller) -> JobView:
        return self.view(self._owned(job_id, caller))

    def stop(self, job_id: str, caller: Caller) -> JobView:
        caller.acting_on(self._store.job(job_id))
        return self.view(self._store.request_stop(job_id))

    def retry(self, job_id: str, caller: Caller, key: str | None) -> JobView:
        """Submit the same again; training goes on from its last checkpoint, which lies under the same `out`.

        A deadline that has passed is left out.
        """
        job = caller.acting_on(self._store.job(job_id))
        if not job.is_final:
            raise ConflictError(f"{job_id} is {job.state}.", hint=f"Stop it first: `raytide stop {job_id}`.")
        is_late = job.spec.due_at_s is not None and job.spec.due_at_s <= self._clock.now_s()
        body = job.spec.model_dump(mode="json") | ({"deadline": None} if is_late else {})
        return self.submit(body, caller, key, digest=f"retry of {job_id}")

    def why(self, job_id: str, caller: Caller) -> WhyView:
        """Of a job; or of `unmanaged`, all work in Ray that has no lease."""
        if job_id == UNMANAGED:
            found = self.live().waiting.get(UNMANAGED, Waiting("", "no work without a lease waits."))
            return WhyView(UNMANAGED, None, None, found.constraint, found.reason, found.remedy, None)
        view = self.view(self._owned(job_id, caller))
        job, waits = view.job, view.waiting
        if waits is None or job.is_final:
            given = "" if view.lease is None else given_away_text(view.lease)
            reason = f"{job.reason}; {given}" if given else job.reason
            return WhyView(job.id, job.state, view.position, "", reason, "", None, view.stance)
        told = (waits.constraint, waits.reason, waits.remedy, waits.wait_s)
        return WhyView(job.id, job.state, view.position, *told, view.stance)

    def set_budget(self, job_id: str, caller: Caller, usd: float | None, *, soft: bool, per: BudgetPer) -> JobView:
        """None takes the limit away."""
        return self.view(self.accounts.set_job_budget(self._owned(job_id, caller), usd, soft=soft, per=per))

    def logs(self, job_id: str, caller: Caller, after: str, tail: int | None) -> LogPart:
        """Some of it from that place on, or from so many lines before its end."""
        job = self._owned(job_id, caller)
        if job.spec.kind is JobKind.GANG:
            raise UsageError(
                f"{job_id} is a gang: what its driver prints is where that was started.",
                hint="`ray job logs` has it of a driver under `ray job submit`.",
            )
        return logs.part(self._drivers, job, after if tail is None else logs.tail(self._drivers, job, tail))

    def package(self, digest: str, caller: Caller) -> Path:
        """For the drivers of jobs, and for whoever's team has a job with it that is not over."""
        if caller.team != ANY_TEAM and digest not in self._packages_in_use(caller.team):
            raise DeniedError(
                f"no job of team {caller.team} that is not over has package {digest[:12]}.",
                hint="Submit the script anew: `raytide run` uploads it.",
            )
        return self.packages.path(digest)

    def make_room(self, caller: Caller, announced: int | None) -> None:
        """For a package of so many bytes, or of the most."""
        size = MOST_BYTES if announced is None else min(announced, MOST_BYTES)
        self.packages.make_room(self._packages_in_use(), caller.home, size)

    def _packages_in_use(self, team: str | None = None) -> set[str]:
        jobs = self._store.jobs(active=True, team=team, limit=_ALL)
        return {str(job.spec.config["package"]) for job in jobs if job.spec.config.get("package")}

    def report(self, job_id: str, caller: Caller, progress: Mapping[str, object]) -> None:
        caller.acting_on(self._store.job(job_id))
        known = {name: value for name, value in progress.items() if isinstance(value, int | float | str)}
        if odd := sorted(progress.keys() - known.keys()):
            raise UsageError(
                f"progress {odd[0]!r} of {job_id} is neither number nor text.", hint="Report one of these."
            )
        if huge := [name for name, value in known.items() if isinstance(value, int) and value.bit_length() > 63]:
            raise UsageError(f"progress {huge[0]!r} of {job_id} is more than 64 bits hold.", hint="Report less.")
        self._store.report(job_id, known, self._clock.now_s())

    def release(self, job_id: str, caller: Caller, error: str) -> None:
        caller.acting_on(self._store.job(job_id))
        self._store.release(job_id, error=bounds.shortened(error))

    def lease(self, job_id: str, caller: Caller) -> Lease:
        """The job's lease; while it has none yet, one that waits, with epoch -1. LeaseLostError when it is over."""
        return self.leases.lease(caller.acting_on(self._store.job(job_id)))

    def view(self, job: Job) -> JobView:
        return self._views((job,))[0]

    # Endpoints.

    def serve(self, body: Mapping[str, object], caller: Caller) -> EndpointStatus:
        spec = ServeSpec.parse({"team": caller.home, **body}, where="serve")
        caller.require_team(spec.team)
        self.accounts.check_team(spec.team)
        if spec.priority is not None:
            self._check_priority(spec.priority)
        labels = resolve_accelerator(spec.labels, self._config.node_types)
        spec = spec.model_copy(update={"labels": labels})
        choose_engine(spec)
        self._inputs.check_private(spec.model_dump(), spec.name, is_checked_later=False)
        shape = Shape(members=spec.replicas.min * spec.members, resources=spec.resources, labels=spec.labels)
        check_possible(GangSpec(shapes=(shape,)), self._config.node_types, subject=f"endpoint {spec.name}")
        self._inputs.check_model(spec.model, caller)
        self._store.save_endpoint(spec, caller.user, self._clock.now_s())
        return self.endpoint(spec.name, caller)

    def endpoints(self, caller: Caller) -> list[EndpointStatus]:
        booked = self._store.books.booked("endpoint", team=caller.only_team)
        spent = costs(booked, (entry for entry in self._accrued() if caller.sees(entry.team)), "endpoint")
        live = self.live()
        return [
            EndpointStatus(
                endpoint=endpoint,
                base_url=f"{self._serve_url}/{endpoint.name}/v1",
                ready_replicas=load.ready if (load := live.loads.get(endpoint.name)) else 0,
                ongoing=load.ongoing if load else 0.0,
                cost_micro_usd=spent.get(endpoint.name, 0),
                waiting=live.waiting.get(endpoint.name),
                cold_start_s=cold_start_s(endpoint.spec.replicas, load),
                cold_start_is_learned=bool(load and load.traffic and load.traffic.cold_start_s is not None),
                paces=load.traffic.paces if load and load.traffic else {},
            )
            for endpoint in self._store.endpoints(ended=True)
            if caller.sees(endpoint.spec.team)
        ]

    def endpoint(self, name: str, caller: Caller) -> EndpointStatus:
        caller.require_team(self._store.endpoint(name).spec.team)
        return next(status for status in self.endpoints(caller) if status.endpoint.name == name)

    def delete_endpoint(self, name: str, caller: Caller) -> EndpointStatus:
        caller.require_team(self._store.endpoint(name).spec.team)
        self._store.request_delete(name)
        return self.endpoint(name, caller)

    # The cluster.

    def status(self, caller: Caller) -> ClusterStatus:
        """Money is the caller's team's; a token for every team sees all of it."""
        now = self._clock.now_s()
        live = self.live()
        nodes = self._store.nodes(live=True)
        booked = self._store.books.booked("team")
        pending = self._accrued()
        burn = rates(self._store.books.intervals())
        return ClusterStatus(
            name=self._config.name,
            at_s=now,
            controller_age_s=self.watch.controller_age_s(),
            nodes=nodes[::-1],
            jobs=self._store.census.jobs(),
            endpoints=len(self._store.endpoints()),
            price_micro_usd_h=round(sum(rate for (_, _, team, _), rate in burn.items() if caller.sees(team))),
            cost_micro_usd=sum(amount for team, amount in booked.items() if caller.sees(team))
            + sum(entry.amount_micro_usd for entry in pending if caller.sees(entry.team)),
            ray=self._ray_url,
            ray_environment=self._ray_environment,
            serve=self._serve_url,
            errors=(*(trouble.text for trouble in self.watch.troubles()), *live.errors),
        )

    def plans(self, caller: Caller, limit: int, until_s: float | None) -> list[dict[str, object]]:
        """Each shows every team's jobs, and their limits."""
        caller.require_all()
        return [
            {"at_s": plan.at_s, "last_at_s": plan.last_at_s, "actions": [dict(action) for action in plan.actions]}
            for plan in self._store.plans(limit=limit, until_s=until_s)
        ]

    def snapshot(self, caller: Caller) -> str:
        """What the controller decides on in its next tick, as JSON; it shows every team's jobs."""
        caller.require_all()
        return request_snapshot(self._live_path.parent)

    def cost(self, caller: Caller) -> CostReport:
        team = caller.only_team
        return cost_report(self._store.books, self._bill.machines(), to_us(self._clock.now_s()), team)

    def costs(self, by: By, caller: Caller, since_s: float) -> CostTable:
        return self.accounts.cost(by, caller, max(0, to_us(since_s)), to_us(self._clock.now_s()))

    def teams(self, caller: Caller) -> list[TeamView]:
        return self.accounts.teams(caller, self.live(), to_us(self._clock.now_s()))

    def metrics(self) -> bytes:
        """Prometheus' text format."""
        return render(samples(self._store, self.live(), self.watch))

    def health(self) -> dict[str, object]:
        """`troubles` are codes: their texts name paths, and are for `status`, which asks for a token."""
        troubles = [trouble.code for trouble in self.watch.troubles()]
        return {"ok": True, "controller_at_s": self.live().at_s, "troubles": troubles}

    def live(self) -> Live:
        """What the controller saw last; empty before its first tick."""
        return self.watch.live()

    def _views(self, jobs: tuple[Job, ...]) -> list[JobView]:
        """A page of jobs: the number of reads does not depend on how many there are, nor on how long the queue is."""
        ids = [job.id for job in jobs]
        live = self.live()
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
                waiting = None  # the controller looked before its last member was there
            views.append(
                JobView(
                    job=job,
                    position=positions.get(job.id) if job.state is JobState.QUEUED else None,
                    cost_micro_usd=spent.get(job.id, 0),
                    price_micro_usd_h=round(rate_micro_usd_h(intervals, EntryKind.JOB, job.id)),
                    lease=lease,
                    waiting=waiting,
                    stance=None if job.is_final else live.stances.get(job.id),
                    month_micro_usd=in_month.get(job.id, 0) if job.spec.budget_per == "month" else None,
                )
            )
        return views

    def _accrued(self) -> tuple[Entry, ...]:
        return accrued(self._store.books.intervals(), to_us(self._clock.now_s()))

    def _owned(self, job_id: str, caller: Caller) -> Job:
        job = self._store.job(job_id)
        caller.require_team(job.spec.team)
        return job

    def _check_priority(self, priority: str) -> None:
        classes = self._config.settings.priorities
        if priority not in classes:
            raise ConfigError(
                f"there is no priority class {priority}.",
                hint=f"There are {', '.join(sorted(classes, key=lambda name: -classes[name]))}.",
            )

    def _check_config(self, spec: JobSpec, caller: Caller) -> None:
        """A job whose own spec is wrong, or whose dataset is missing, is refused before it waits for anything."""
        if spec.kind is not JobKind.SCRIPT:
            self._inputs.check_private(spec.config, spec.name, is_checked_later=True)
        if spec.kind is JobKind.TRAIN:
            self._inputs.check_training(TrainSpec.parse(spec.config, where=spec.name), caller)
        elif spec.kind is JobKind.DATA:
            self._inputs.check_build(DataSpec.parse(spec.config, where=spec.name))
        elif spec.kind is JobKind.SCRIPT and (package := ScriptSpec.parse(spec.config, where=spec.name).package):
            self.packages.path(package)


def _is_whole(lease: Lease) -> bool:
    return lease.state is LeaseState.ACTIVE and all(each.is_usable or each.is_parked for each in lease.members)
