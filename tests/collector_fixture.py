"""An OTLP collector on this machine: the spans that a real exporter sends, decoded with OpenTelemetry's own schema."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace: str
    span: str
    parent: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    error: str


class Collector:
    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self.headers: list[dict[str, str]] = []

    def add(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            service = next(
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            )
            for scope in resource.scope_spans:
                self.spans += [_span(service, each) for each in scope.spans]


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes},
        span.status.message,
    )


@contextmanager
def running_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.headers.append(dict(self.headers))
            if self.path == "/v1/traces":
                collector.add(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
