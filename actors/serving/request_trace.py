"""The trace of one request. Routes record the request's result. Spans follow OpenTelemetry's conventions for generative
AI.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.types import Scope

from raytide.actors.engine.types import Timing, TokenUsage
from raytide.core.telemetry.tracing import Attributes, SpanId, Tracer

_TRACE = "raytide.trace"
"""The key of the ASGI scope under which a request's trace is."""
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}

_PHASES = ("gateway", "queue", "prefill", "decode")
"""The phases of a request. `gateway` lasts until an engine has the request, and includes waiting for a replica and for
the request's turn.
"""


@dataclass(slots=True)
class RequestTrace:
    place: SpanId
    began_s: float
    """The time at which the request began, in seconds since 1970 like all times here."""
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict)
    model: str = ""
    _ended_s: float = 0.0
    _timings: Sequence[Timing] = ()

    def put(self, scope: Scope) -> None:
        scope[_TRACE] = self

    @staticmethod
    def of(scope: Scope) -> RequestTrace | None:
        """Returns the trace of a request. Returns None if the request is not traced."""
        trace: RequestTrace | None = scope.get(_TRACE)
        return trace

    def ended(self, usage: TokenUsage, reasons: Sequence[str], replica: str, timings: Sequence[Timing]) -> None:
        """Records the end of the generation: the request's token counts, the finish reasons, the replica, and the
        engine's times for each finished prompt.
        """
        self._ended_s, self._timings = time.time(), timings
        self.attributes |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "raytide.cached_tokens": usage.cached_tokens,
            "raytide.finish_reasons": " ".join(reasons),
            "raytide.replica": replica,
        }

    def export(self, tracer: Tracer, path: str, status: int, ended_s: float) -> None:
        """Exports one span for the request and one span for each phase in the engine. `status` is 0 if the client
        left.
        """
        operation = _OPERATIONS.get(path, "request")
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "raytide",
            "http.response.status_code": status or 499,
            "url.path": path[:256],
            **({"gen_ai.request.model": self.model} if self.model else {}),
            **self.attributes,
        }
        error = f"status {status}" if status >= 500 else ""
        name = f"{operation} {self.model}".rstrip()
        tracer.record(name, self.place, self.began_s, ended_s, attributes, kind="server", error=error)
        for timing in self._timings:
            first_token_s = self._ended_s - timing.decode_s
            started_s = first_token_s - timing.prefill_s
            queued_s = max(self.began_s, started_s - timing.queue_s)
            times_s = (self.began_s, queued_s, started_s, first_token_s, self._ended_s)
            for phase, start_s, end_s in zip(_PHASES, times_s, times_s[1:], strict=False):
                tracer.record(phase, self.place.child(), start_s, end_s)
