"""Traces a sample of the gateway's requests."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raytide.actors.serving.request_trace import RequestTrace
from raytide.core.telemetry.settings import TracingSection
from raytide.core.telemetry.tracing import TRACEPARENT, Tracer, TraceSampler, traced_logs

TRACE_ID_HEADER = "x-trace-id"
_NAME = TRACEPARENT.encode()


@dataclass(frozen=True, slots=True)
class RequestTracing:
    """The sampler and the tracer with which one gateway process traces requests."""

    sampler: TraceSampler
    tracer: Tracer

    @classmethod
    def of(cls, section: TracingSection) -> RequestTracing | None:
        """Returns the tracing that the configuration describes. Returns None if the configuration names no trace
        collector.
        """
        tracer = Tracer.over_otlp(section, "raytide-gateway")
        return None if tracer is None else cls(TraceSampler(section), tracer)

    def close(self) -> None:
        self.tracer.close()


class TracedRequests:
    """Middleware that traces a sample of the requests to `/v1/...`. It passes all other requests on unchanged.

    It must run inside the middleware that takes the endpoint's name from the path.
    """

    def __init__(self, app: ASGIApp, tracing: RequestTracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = None
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            asked = next((value.decode("latin-1") for name, value in scope["headers"] if name == _NAME), "")
            place = self._tracing.sampler.sampled(asked)
        if place is None:
            await self._app(scope, receive, send)
            return
        trace, status = RequestTrace(place, time.time()), 0
        trace.put(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[TRACE_ID_HEADER] = place.trace_id
            await send(message)

        try:
            with traced_logs(place):
                await self._app(scope, receive, send_with_id)
        finally:
            trace.export(self._tracing.tracer, scope["path"], status, time.time())
