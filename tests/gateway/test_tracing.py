"""Traces of requests, as a collector gets them."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import pytest
from tests.collector_fixture import Collector, running_collector
from tests.gateway.conftest import running_gateway

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.core.logs import JsonLines
from raytide.core.telemetry.metrics import HistogramSample
from raytide.core.telemetry.settings import TracingSection
from raytide.gateway.tracing import RequestTracing

TRACE, PARENT = "ab" * 16, "cd" * 8


def tracing_to(collector: Collector, **section: Any) -> RequestTracing:
    tracing = RequestTracing.of(TracingSection(otlp=collector.url, **section))
    assert tracing is not None
    return tracing


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **more}


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_traced_request_has_a_span_for_each_phase(stream: bool) -> None:
    with running_collector() as collector:
        tracing = tracing_to(collector, sample=0.0)
        async with running_gateway(tracing=tracing) as gateway:
            await gateway.deploy("tide", FakeEngine(reply="tide ", tokens_per_s=20))
            answer = await gateway.http.post(
                "/tide/v1/chat/completions",
                json=chat("tide", stream=stream),
                headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
            )
            assert answer.headers["x-trace-id"] == TRACE
            unsampled = await gateway.http.post("/v1/chat/completions", json=chat("tide"))
            refused = await gateway.http.post(
                "/v1/chat/completions", json=chat("tide"), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}
            )
            assert "x-trace-id" not in {*unsampled.headers, *refused.headers}
            exemplars = {
                sample.metric.name: {exemplar.trace_id for exemplar in sample.exemplars.values()}
                for sample in gateway.models.samples()
                if isinstance(sample, HistogramSample) and sample.exemplars
            }
            seen = ("raytide_time_to_first_token_seconds", "raytide_inter_token_seconds", "raytide_request_seconds")
            assert exemplars == {name: {TRACE} for name in seen}
        tracing.close()
        root, *phases = sorted(collector.spans, key=lambda each: each.name != "chat tide")
        assert (root.name, root.service, root.trace, root.parent) == ("chat tide", "raytide-gateway", TRACE, PARENT)
        assert root.attributes["gen_ai.usage.output_tokens"] == 5
        assert root.attributes["raytide.replica"] == "tide-0"
        assert root.attributes["raytide.finish_reasons"] == "length"
        assert root.attributes["http.response.status_code"] == 200
        assert [phase.name for phase in phases] == ["gateway", "queue", "prefill", "decode"]
        assert {(phase.trace, phase.parent) for phase in phases} == {(TRACE, root.span)}
        edges = [phases[0].start_s, *(phase.end_s for phase in phases)]
        assert edges == sorted(edges)
        assert root.start_s <= edges[0]
        assert edges[-1] <= root.end_s
        assert phases[-1].end_s - phases[-1].start_s >= 0.05, "four tokens at 20 a second; the first may arrive late"


@pytest.mark.asyncio
async def test_a_share_of_all_requests_is_traced_and_refused_ones_too() -> None:
    with running_collector() as collector:
        tracing = tracing_to(collector, sample=1.0, most_per_s=1000)
        async with running_gateway(tracing=tracing) as gateway:
            missing = await gateway.http.post("/v1/completions", json={"model": "none", "prompt": "x"})
            assert (await gateway.http.get("/health")).status_code == 200
        tracing.close()
        (span,) = collector.spans
        assert (span.trace, span.parent) == (missing.headers["x-trace-id"], "")
        assert (span.name, span.attributes["http.response.status_code"]) == ("text_completion", 404)


@pytest.mark.asyncio
async def test_log_lines_of_a_traced_request_name_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("a bug")

    lines: list[dict[str, Any]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonLines().format(record)))

    log, handler = logging.getLogger("raytide"), Kept()
    log.addHandler(handler)
    try:
        with running_collector() as collector:
            tracing = tracing_to(collector, sample=0.0)
            async with running_gateway(tracing=tracing) as gateway:
                await gateway.deploy("tide", FakeEngine())
                monkeypatch.setattr(gateway.models.endpoint("tide")[0], "generate", fail)
                headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
                for each in (headers, {}):
                    await gateway.http.post("/v1/chat/completions", json=chat("tide"), headers=each)
            tracing.close()
    finally:
        log.removeHandler(handler)
    assert [line.get("trace_id") for line in lines if line["message"] == "a request failed"] == [TRACE, None]


@pytest.mark.asyncio
async def test_requests_are_answered_without_a_collector() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # nothing listens
        section = TracingSection(otlp=f"http://127.0.0.1:{nobody.getsockname()[1]}", sample=1.0)
        tracing = RequestTracing.of(section)
        assert tracing is not None
        async with running_gateway(tracing=tracing) as gateway:
            await gateway.deploy("tide", FakeEngine())
            answer = await gateway.http.post("/v1/chat/completions", json=chat("tide"))
            assert answer.status_code == 200
        tracing.close()


def test_nothing_is_traced_without_an_address() -> None:
    assert RequestTracing.of(TracingSection()) is None
