"""A runner of stages that runs nothing: tests say what becomes of each job."""

from __future__ import annotations

from dataclasses import dataclass, field

from raytide.core.errors import ClusterError
from raytide.workflows.stages.base import StageReport, StageTask


@dataclass
class FakeJob:
    task: StageTask
    report: StageReport = field(default_factory=lambda: StageReport("running"))
    stops: int = 0


@dataclass
class FakeRunner:
    """The world outside a driver, which no kill of the driver changes."""

    jobs: dict[str, FakeJob] = field(default_factory=dict)
    by_key: dict[str, str] = field(default_factory=dict)
    is_away: bool = False

    def submit(self, task: StageTask) -> str:
        if self.is_away:
            raise ClusterError("the API does not answer.")
        if task.key not in self.by_key:
            job = f"job-{len(self.jobs)}"
            self.by_key[task.key], self.jobs[job] = job, FakeJob(task)
        known = self.jobs[self.by_key[task.key]].task
        assert known == task, "the same key must be the same request: the API refuses any other"
        return self.by_key[task.key]

    def look(self, task: StageTask, handle: str, metric: str = "") -> StageReport:
        if self.is_away:
            raise ClusterError("the API does not answer.")
        return self.jobs[handle].report

    def stop(self, task: StageTask, handle: str) -> None:
        self.jobs[handle].stops += 1

    def of_stage(self, name: str) -> list[FakeJob]:
        return [job for job in self.jobs.values() if job.task.labels["stage"] == name]

    def end(self, handle: str, report: StageReport) -> None:
        self.jobs[handle].report = report
