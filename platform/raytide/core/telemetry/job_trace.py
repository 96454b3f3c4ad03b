"""The trace of an ended job, made from the recorded states of the job and of its lease."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raytide.core.objects.job import Job, JobState
from raytide.core.state import Store
from raytide.core.state.records import Event
from raytide.core.telemetry.settings import TracingSection
from raytide.core.telemetry.tracing import Attributes, SpanId, Tracer

_MOST_EVENTS = 1000
_SERVICE, _STEPS_SERVICE = "raytide-controller", "raytide-api"
_STEPS_S = 10.0
_MOST_JOBS = 10_000


def root_of(job: Job) -> SpanId:
    """Returns the root span of a job's trace. The controller exports this span, and the driver adds child spans."""
    return SpanId.of(f"{job.id} {job.submitted_at_s!r}")


@dataclass(frozen=True, slots=True)
class JobSpan:
    name: str
    place: SpanId
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""


def job_spans(job: Job, events: Sequence[Event], lease_events: Sequence[Event]) -> Iterator[JobSpan]:
    """Yields the spans of an ended job: the job, each of its states, its lease, and each state of the lease.

    `events` and `lease_events` are sorted with the oldest first. A state lasts until the next event, and the last state
    until the job's end.
    """
    root, end_s = root_of(job), job.ended_at_s or job.submitted_at_s
    attributes: Attributes = {
        "raytide.job": job.id,
        "raytide.kind": str(job.spec.kind),
        "raytide.team": job.spec.team,
        "raytide.user": job.user,
        "raytide.state": str(job.state),
        "raytide.restarts": job.restarts,
        "raytide.preemptions": job.preemptions,
    }
    error = (job.reason or "failed") if job.state is JobState.FAILED else ""
    yield JobSpan(f"job {job.spec.kind}", root, job.submitted_at_s, end_s, attributes, error)
    yield from _states(root, "", events, end_s)
    if lease_events:
        lease, start_s = root.child("lease"), lease_events[0].at_s
        yield JobSpan("lease", lease, start_s, end_s, {"raytide.lease": lease_events[0].subject})
        yield from _states(lease, "gang ", lease_events, end_s)


def _states(parent: SpanId, prefix: str, events: Sequence[Event], end_s: float) -> Iterator[JobSpan]:
    """Yields a span for each state that took any time."""
    ends_s = [*(event.at_s for event in events), end_s][1:]
    for number, (event, until_s) in enumerate(zip(events, ends_s, strict=True)):
        if until_s > event.at_s:
            reason = {"raytide.reason": event.reason} if event.reason else {}
            place = parent.child(f"{prefix}{event.to_state} {number}")
            yield JobSpan(f"{prefix}{event.to_state}", place, event.at_s, until_s, reason)


class StepTraces:
    """Adds spans for training steps to the traces of jobs. The spans are made from the progress that jobs report. One
    span covers all steps within `_STEPS_S` seconds.
    """

    def __init__(self, section: TracingSection, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or Tracer.over_otlp(section, _STEPS_SERVICE)
        self._last: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """For each job, the last step and time that are exported."""
        self._lock = threading.Lock()

    def on_report(self, job: Job, progress: Mapping[str, float | int | str], now_s: float) -> None:
        """Handles a job's report of its progress. If `_STEPS_S` seconds have passed since the job's last span, exports
        one span for the steps since then. If the job went back to an earlier step, a new span begins at that step.
        """
        step = progress.get("step")
        if self._tracer is None or not isinstance(step, int | float) or not math.isfinite(step):
            return
        with self._lock:
            before, since_s = self._last.get(job.id, (math.inf, now_s))
            if before <= step and now_s - since_s < _STEPS_S:
                return
            self._last[job.id] = (step, now_s)
            self._last.move_to_end(job.id)
            if len(self._last) > _MOST_JOBS:
                self._last.popitem(last=False)
        if before < step:
            numbers = {f"raytide.{name}": value for name, value in progress.items() if isinstance(value, int | float)}
            place = root_of(job).child(f"steps {before!r} {since_s!r}")
            self._tracer.record("steps", place, since_s, now_s, {"raytide.after_step": before, **numbers})

    def close(self) -> None:
        if self._tracer is not None:
            self._tracer.close()


class JobTraces:
    """Exports the trace of each job when the job ends."""

    def __init__(self, section: TracingSection, store: Store, tracer: Tracer | None = None) -> None:
        self._store, self._tracer = store, tracer or Tracer.over_otlp(section, _SERVICE)

    def export(self, before: Iterable[Job], after: Mapping[str, Job]) -> None:
        """Exports the traces of the jobs that were unfinished in `before` and have ended in the meantime. `after` maps
        the ids of jobs to their current state.
        """
        if self._tracer is None:
            return
        for job in before:
            ended = after.get(job.id, job)
            if ended.is_final and not job.is_final:
                lease = self._store.lease_of(job.id)
                events = self._store.events(job.id, limit=_MOST_EVENTS)
                of_lease = () if lease is None else self._store.events(lease.id, limit=_MOST_EVENTS)
                for span in job_spans(ended, events, of_lease):
                    self._tracer.record(
                        span.name, span.place, span.start_s, span.end_s, span.attributes, error=span.error
                    )

    def close(self) -> None:
        if self._tracer is not None:
            self._tracer.close()
