"""Measures an endpoint's latency at the client, and reports it to the API for the cluster's metrics."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from raytide.core.errors import RaytideError
from raytide.core.io.environment import without_proxy
from raytide.core.telemetry.catalogue.client import CLIENT_FIRST_TOKEN_SECONDS, CLIENT_REQUEST_SECONDS

if TYPE_CHECKING:
    from openai import DefaultHttpxClient

    from raytide.core.telemetry.metrics import Metric

REPORT_S = 10.0
"""The least time between two reports, in seconds."""
_BEGAN, _DONE = "raytide.began_s", b"data: [DONE]\n\n"


class LatencyReporter:
    """The latencies that one client has measured since its last report. A report that fails is dropped, so that
    requests never wait for it.
    """

    def __init__(self, send: Callable[[dict[str, Any]], object]) -> None:
        self._send, self._lock = send, threading.Lock()
        self._next_s = time.monotonic() + REPORT_S
        self._reset()
        _reporters.add(self)

    def http_client(self, base_url: str) -> DefaultHttpxClient:
        """Returns an HTTP client for `openai.OpenAI(base_url=base_url)` that measures each successful request."""
        from openai import DefaultHttpxClient

        hooks: dict[str, list[Callable[..., Any]]] = {"request": [self._began], "response": [self._answered]}
        return DefaultHttpxClient(event_hooks=hooks, mounts=without_proxy(base_url))

    def observe(self, metric: Metric, seconds: float) -> None:
        with self._lock:
            counts = self._counts[metric]
            counts[bisect_left(metric.buckets, seconds)] += 1
            self._sums[metric] += seconds
            is_due = time.monotonic() >= self._next_s
            if is_due:
                self._next_s = time.monotonic() + REPORT_S
        if is_due:
            threading.Thread(target=self.flush, name="client latency", daemon=True).start()

    def flush(self) -> None:
        """Reports the latencies measured since the last report, if there are any."""
        with self._lock:
            counts, sums = self._counts, self._sums
            self._reset()
        if not any(any(each) for each in counts.values()):
            return
        body = {
            "requests": counts[CLIENT_REQUEST_SECONDS],
            "requests_s": sums[CLIENT_REQUEST_SECONDS],
            "first_tokens": counts[CLIENT_FIRST_TOKEN_SECONDS],
            "first_tokens_s": sums[CLIENT_FIRST_TOKEN_SECONDS],
        }
        with suppress(RaytideError):
            self._send(body)

    def _reset(self) -> None:
        both = (CLIENT_REQUEST_SECONDS, CLIENT_FIRST_TOKEN_SECONDS)
        self._counts = {metric: [0] * (len(metric.buckets) + 1) for metric in both}
        self._sums = dict.fromkeys(both, 0.0)

    def _began(self, request: Any) -> None:
        request.extensions[_BEGAN] = time.perf_counter()

    def _answered(self, response: Any) -> None:
        if response.is_success:
            response.stream = _timed(response, self)


class _TimedBody:
    """A response's body. It reports the seconds until its last part arrives, and, if streamed, until its first part."""

    def __init__(self, response: Any, reporter: LatencyReporter) -> None:
        self._stream, self._reporter = response.stream, reporter
        self._began_s: float = response.request.extensions[_BEGAN]
        self._is_ended = False
        self._is_streamed = response.headers.get("content-type", "").startswith("text/event-stream")

    def __iter__(self) -> Iterator[bytes]:
        is_first, end = self._is_streamed, b""
        for part in self._stream:
            if is_first:
                is_first = False
                self._reporter.observe(CLIENT_FIRST_TOKEN_SECONDS, time.perf_counter() - self._began_s)
            end = (end + part)[-len(_DONE) :]
            if end == _DONE:  # the client reads no further
                self._end()
            yield part
        self._end()

    def _end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._reporter.observe(CLIENT_REQUEST_SECONDS, time.perf_counter() - self._began_s)

    def close(self) -> None:
        self._stream.close()


def _timed(response: Any, reporter: LatencyReporter) -> Any:
    """Returns the timed body as a stream of the HTTP library that the installed openai uses: httpx or httpx2."""
    base = next(each for each in type(response.stream).__mro__ if each.__name__ == "SyncByteStream")
    return type("TimedStream", (_TimedBody, base), {})(response, reporter)


_reporters: weakref.WeakSet[LatencyReporter] = weakref.WeakSet()


@atexit.register
def _report_the_rest() -> None:
    for reporter in list(_reporters):
        reporter.flush()
