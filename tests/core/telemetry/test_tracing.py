"""The requests that are traced, and the spans of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collector_fixture import running_collector
from tests.stores import new_store

from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.state import Changes
from raytide.core.state.records import Event
from raytide.core.telemetry import tracing
from raytide.core.telemetry.job_trace import JobTraces, StepTraces, job_spans, root_of
from raytide.core.telemetry.settings import TracingSection
from raytide.core.telemetry.tracing import SpanId, Tracer, TraceSampler

VALID = f"00-{'ab' * 16}-{'cd' * 8}-01"
ON = TracingSection(otlp="http://127.0.0.1:1", sample=0.0)


@pytest.mark.parametrize(
    "header",
    ["", "x", VALID[:-3], VALID + "-more", f"00-{'0' * 32}-{'cd' * 8}-01", f"ff{VALID[2:]}", VALID.upper(), VALID * 99],
)
def test_a_broken_traceparent_counts_as_none(header: str) -> None:
    assert TraceSampler(ON).sampled(header) is None
    assert SpanId.new(header).parent == 0


def test_a_callers_decision_goes_before_the_share() -> None:
    always = TraceSampler(TracingSection(otlp="http://127.0.0.1:1", sample=1.0))
    assert TraceSampler(ON).sampled(VALID) == SpanId(
        int("ab" * 16, 16), pytest.approx(2**63, abs=2**63), int("cd" * 8, 16)
    )  # type: ignore[arg-type]
    assert always.sampled(VALID[:-1] + "0") is None
    assert always.sampled(f"01{VALID[2:]}-of-the-future") is not None
    assert TraceSampler(TracingSection()).sampled(VALID) is None


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=60))
def test_strangers_cannot_have_more_traced_than_the_operator_allows(gaps_s: Sequence[float]) -> None:
    now_s = 100.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tracing.time, "monotonic", lambda: now_s)
        sampler, taken = TraceSampler(ON.model_copy(update={"most_per_s": 3.0})), 0
        for gap_s in gaps_s:
            now_s += gap_s
            taken += sampler.sampled(VALID) is not None
    assert taken <= 3 + 3 * sum(gaps_s) + 1e-6


def test_less_than_a_trace_a_second_is_a_trace_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([100.0, 100.0, 101.0, 102.0, 103.0, 110.0, 110.0])
    clock = SimpleNamespace(monotonic=lambda: next(now_s))  # of the sampler alone: other threads have theirs
    monkeypatch.setattr(tracing, "time", clock)
    sampler = TraceSampler(ON.model_copy(update={"most_per_s": 0.5}))
    assert [sampler.sampled(VALID) is not None for _ in range(6)] == [True, False, True, False, True, False]


@given(st.text(), st.text())
def test_a_subject_has_one_span_and_names_one_child(subject: str, name: str) -> None:
    root = SpanId.of(subject)
    assert root == SpanId.of(subject)
    child = root.child(name or "x")
    assert child == root.child(name or "x")
    assert (child.trace, child.parent) == (root.trace, root.span)
    assert SpanId.new(root.traceparent).parent == root.span


JOB = Job(
    "job-1",
    JobSpec(
        kind=JobKind.SCRIPT, name="j", team="default", gang=GangSpec(shapes=(Shape(resources={"CPU": 1}),)), config={}
    ),
    "ana",
    JobState.FAILED,
    10.0,
    ended_at_s=60.0,
    reason="exit code 1",
)
EVENTS = (
    Event(10.0, "job-1", "", "queued", "submitted by ana"),
    Event(20.0, "job-1", "queued", "admitted"),
    Event(30.0, "job-1", "admitted", "running"),
    Event(60.0, "job-1", "running", "failed", "exit code 1"),
)
LEASE = (
    Event(20.0, "lease-1", "", "waiting"),
    Event(25.0, "lease-1", "waiting", "forming"),
    Event(30.0, "lease-1", "forming", "active"),
    Event(60.0, "lease-1", "active", "released"),
)


def test_the_states_of_a_job_and_of_its_lease_are_spans() -> None:
    spans = list(job_spans(JOB, EVENTS, LEASE))
    assert [(span.name, span.start_s, span.end_s) for span in spans] == [
        ("job script", 10.0, 60.0),
        ("queued", 10.0, 20.0),
        ("admitted", 20.0, 30.0),
        ("running", 30.0, 60.0),
        ("lease", 20.0, 60.0),
        ("gang waiting", 20.0, 25.0),
        ("gang forming", 25.0, 30.0),
        ("gang active", 30.0, 60.0),
    ]
    assert spans[0].error == "exit code 1"
    lease = next(span for span in spans if span.name == "lease")
    assert lease.place.parent == root_of(JOB).span
    assert {span.place.parent for span in spans if span.name.startswith("gang")} == {lease.place.span}
    assert len({span.place.span for span in spans}) == len(spans)


@given(st.lists(st.tuples(st.floats(0, 50), st.sampled_from(["queued", "admitted", "running"])), max_size=8))
def test_every_span_is_within_its_job(steps: Sequence[tuple[float, str]]) -> None:
    at_s = sorted(10 + step[0] for step in steps)
    events = [Event(when, "job-1", "", state) for when, (_, state) in zip(at_s, steps, strict=True)]
    root, *others = job_spans(JOB, events, ())
    assert all(root.start_s <= span.start_s < span.end_s <= root.end_s for span in others)


def test_reported_steps_are_spans_of_the_jobs_trace() -> None:
    reports: list[tuple[float, dict[str, float | int | str]]] = [
        (0.0, {"stage": "load"}),
        (1.0, {"step": 0, "loss": 9.0}),
        (5.0, {"step": 4, "loss": 8.0}),
        (12.0, {"step": 10, "loss": 7.0, "note": "x"}),
        (14.0, {"step": 8, "loss": 7.5}),  # a member was lost: steps are done again
        (30.0, {"step": 8}),
        (45.0, {"step": 20}),
        (60.0, {"step": "many"}),
    ]
    with running_collector() as collector:
        traces = StepTraces(TracingSection(otlp=collector.url))
        for at_s, progress in reports:
            traces.on_report(JOB, progress, at_s)
        traces.close()
    spans = sorted(collector.spans, key=lambda span: span.start_s)
    assert [(span.start_s, span.end_s, span.attributes["raytide.after_step"]) for span in spans] == [
        (1.0, 12.0, 0),
        (30.0, 45.0, 8),
    ]
    assert {(span.name, span.service, span.trace) for span in spans} == {
        ("steps", "raytide-api", root_of(JOB).trace_id)
    }
    assert spans[0].attributes["raytide.loss"] == 7.0
    assert "raytide.note" not in spans[0].attributes


def test_a_job_is_exported_once_when_it_ends(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    job = store.submit_job(JOB.spec, "ana", 10.0)
    with running_collector() as collector:
        section = TracingSection(otlp=collector.url)
        traces = JobTraces(section, store, Tracer.over_otlp(section, "raytide-controller"))
        ended = replace(job, state=JobState.STOPPED, ended_at_s=12.0)
        store.commit(Changes(at_s=12.0, jobs=(ended,)))
        traces.export((job,), {job.id: job})
        traces.export((job,), {job.id: ended})
        traces.export((ended,), {job.id: ended})
        traces.close()
    assert sorted(span.name for span in collector.spans) == ["job script", "queued"]
    root = next(span for span in collector.spans if span.name == "job script")
    assert (root.trace, root.attributes["raytide.job"]) == (root_of(job).trace_id, job.id)
    assert root.end_s - root.start_s == pytest.approx(2.0)
