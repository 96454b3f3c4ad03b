"""Traces of requests and jobs. A span is exported after its end, with ids and times that the caller provides. The
export uses OpenTelemetry's SDK over OTLP.

A process that traces nothing does not import OpenTelemetry. Besides the exported spans, three places show the id of
a request's trace: the request's log lines (see `raytide.core.logs`), the response's header `x-trace-id`, and the
exemplars of histograms.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, Self

from raytide.core.logs import TRACE_ID
from raytide.core.telemetry.settings import TracingSection

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACEPARENT = "traceparent"
"""The header of W3C Trace Context."""
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SCOPE = "raytide"
_QUEUE = 4096
"""The most spans that wait for the collector; further spans are dropped."""
_EXPORT_EVERY_MS, _EXPORT_TIMEOUT_S = 2000.0, 5.0

Kind = Literal["internal", "server", "client"]
Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class SpanId:
    """The ids of a span: the id of its trace, its own id, and the id of its parent span. A root span has the parent
    0."""

    trace: int
    span: int
    parent: int = 0

    @classmethod
    def new(cls, traceparent: str = "") -> Self:
        """Returns the ids of a new span. If `traceparent` is valid, the new span is a child of the span that
        `traceparent` names. Otherwise the new span is the root of a new trace."""
        found = _parsed(traceparent)
        trace, parent = (random.getrandbits(128) or 1, 0) if found is None else found[:2]
        return cls(trace, random.getrandbits(64) or 1, parent)

    @classmethod
    def of(cls, subject: str) -> Self:
        """Returns the root span of a subject, such as a job. The span's ids are derived from the subject's name, so
        several processes can add spans to the same trace."""
        digest = sha256(subject.encode()).digest()
        return cls(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1)

    def child(self, name: str = "") -> SpanId:
        """Returns a child of this span. Children with the same name have the same id. A child without a name has a
        random id.
        """
        own = sha256(f"{self.trace:x} {self.span:x} {name}".encode()).digest()[:8] if name else None
        span = random.getrandbits(64) if own is None else int.from_bytes(own)
        return SpanId(self.trace, span or 1, self.span)

    @property
    def trace_id(self) -> str:
        return f"{self.trace:032x}"

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-01"


class TraceSampler:
    """Decides which requests are traced."""

    def __init__(self, section: TracingSection) -> None:
        self._share = section.sample if section.otlp else 0.0
        self._is_on, self._most_per_s = bool(section.otlp), section.most_per_s
        self._most_left = max(1.0, section.most_per_s)  # a trace costs 1: a smaller bucket would never hold enough
        self._left, self._at_s = self._most_left, time.monotonic()

    def sampled(self, traceparent: str = "") -> SpanId | None:
        """Returns the span of a request that is to be traced, or None for a request that is not.

        If `traceparent` is valid, it decides whether the request is traced. Otherwise chance decides. In both cases the
        number of traces per second is limited.
        """
        if not self._is_on:
            return None
        if traceparent and (found := _parsed(traceparent)) is not None:
            wanted = found[2]
        else:
            wanted = random.random() < self._share
        return SpanId.new(traceparent) if wanted and self._takes_place() else None

    def _takes_place(self) -> bool:
        """Returns whether the rate limit (a token bucket) allows another trace now, and counts it."""
        now_s = time.monotonic()
        self._left = min(self._most_left, self._left + (now_s - self._at_s) * self._most_per_s)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Tracer:
    """Exports ended spans in the background. If the collector does not answer, spans are dropped, and no caller
    waits."""

    def __init__(self, service: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._resource = Resource({"service.name": service, "service.instance.id": str(os.getpid())})
        self._scope = InstrumentationScope(_SCOPE)
        self._processor = BatchSpanProcessor(exporter, max_queue_size=_QUEUE, schedule_delay_millis=_EXPORT_EVERY_MS)

    @classmethod
    def over_otlp(cls, section: TracingSection, service: str) -> Tracer | None:
        """Returns a tracer that sends spans to the collector of this section. Returns None if the section names no
        collector."""
        if not section.otlp:
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        pairs = os.environ.get(section.headers_env, "") if section.headers_env else ""
        headers = dict(pair.split("=", 1) for pair in pairs.split(",") if "=" in pair)
        url = f"{section.otlp.rstrip('/')}/v1/traces"
        return cls(service, OTLPSpanExporter(endpoint=url, headers=headers, timeout=_EXPORT_TIMEOUT_S))

    def record(
        self,
        name: str,
        place: SpanId,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        error: str = "",
    ) -> None:
        """Exports a span that has ended. Its times are in seconds since 1970. `error` is empty if the traced work
        succeeded."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span: int) -> SpanContext:
            return SpanContext(place.trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        kinds = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
        self._processor.on_end(
            ReadableSpan(
                name=name,
                context=context(place.span),
                parent=context(place.parent) if place.parent else None,
                resource=self._resource,
                attributes=dict(attributes or {}),
                kind=kinds[kind],
                status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
                start_time=round(start_s * 1e9),
                end_time=round(max(start_s, end_s) * 1e9),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Exports the remaining spans. Gives up after a few seconds."""
        self._processor.shutdown()


@contextmanager
def traced_logs(place: SpanId) -> Iterator[None]:
    """Adds the trace's id to each log line that this task writes inside the block."""
    token = TRACE_ID.set(place.trace_id)
    try:
        yield
    finally:
        TRACE_ID.reset(token)


def _parsed(traceparent: str) -> tuple[int, int, bool] | None:
    """Returns the ids of the trace and the span, and whether the caller traces it; None if `traceparent` is invalid."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace, span, flags = (int(found[number], 16) for number in (2, 3, 4))
    return (trace, span, bool(flags & 1)) if trace and span else None
