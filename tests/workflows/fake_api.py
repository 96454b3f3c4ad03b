"""An API that keeps jobs in memory. Tests end them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raytide.control.client import ApiClient
from raytide.control.views import JobView
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState

GANG = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))


class FakeApi(ApiClient):
    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", "")
        self.jobs_by_id: dict[str, Job] = {}
        self.keys: dict[str, str] = {}
        self.stopped: list[str] = []
        self.packages: dict[str, bytes] = {}

    def submit(self, spec: JobSpec, *, key: str | None = None) -> JobView:
        if key is None or key not in self.keys:
            job = Job(f"job-{len(self.jobs_by_id) + 1}", spec, "ada", JobState.QUEUED, 0.0)
            self.jobs_by_id[job.id] = job
            self.keys[key or job.id] = job.id
        return self.job(self.keys[key or f"job-{len(self.jobs_by_id)}"])

    def add(self, kind: JobKind = JobKind.SCRIPT, **config: object) -> str:
        """Adds a job as if somebody had submitted it."""
        return self.submit(JobSpec(kind=kind, name="own", gang=GANG, config=config)).job.id

    def job(self, job_id: str) -> JobView:
        return JobView(job=self.jobs_by_id[job_id], position=None, cost_micro_usd=0, price_micro_usd_h=0)

    def jobs(self, *, limit: int = 100, offset: int = 0, active: bool = False) -> list[JobView]:
        return [self.job(job_id) for job_id in reversed(self.jobs_by_id)][:limit]

    def end(self, job_id: str, state: JobState = JobState.SUCCEEDED, reason: str = "", **progress: float | str) -> None:
        self.jobs_by_id[job_id] = replace(self.jobs_by_id[job_id], state=state, reason=reason, progress=progress)

    def report(self, job_id: str, progress: Mapping[str, float | int | str]) -> None:
        job = self.jobs_by_id[job_id]
        self.jobs_by_id[job_id] = replace(job, progress={**job.progress, **progress})

    def stop(self, job_id: str) -> JobView:
        self.stopped.append(job_id)
        return self.job(job_id)

    def retry(self, job_id: str, *, key: str | None = None) -> JobView:
        return self.submit(self.jobs_by_id[job_id].spec)

    def upload(self, package: bytes) -> str:
        self.packages["digest"] = package
        return "digest"

    def package(self, digest: str) -> bytes:
        return self.packages[digest]
