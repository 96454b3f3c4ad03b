"""The metrics of one model's server: requests and their latencies as clients see them, and the engine's counters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from raytide.actors.engine.types import EngineStats, Timing
from raytide.core.logs import TRACE_ID
from raytide.core.telemetry.catalogue import application, model
from raytide.core.telemetry.metrics import HistogramRecorder, MetricSample, Sample, ValueRecorder

Outcome = Literal["ok", "aborted", "invalid", "limited", "rejected", "error"]
"""`aborted`: the client went away; `invalid`: 4xx; `limited`: its own limit or budget is reached; `rejected`: the
queue was full; `error`: the server's fault."""

_MOST_NATS = 700.0
"""The largest power of e that a float holds."""
_NO_FIRST_TOKEN = ("embeddings", "rerank", "score", "shadow", "probe")
"""APIs without a time to first token, or whose first token no user waits for."""


class ServingMetrics:
    """The metrics of an endpoint, or of one revision of an endpoint."""

    def __init__(self, endpoint: str, revision: str = "") -> None:
        self.endpoint, self.revision = endpoint, revision
        self.slo_ttft_s: float | None = None
        """The promised time to a first token; None without a promise."""
        self.served_logprob: Callable[[], float | None] = lambda: None
        """Returns the mean log probability of sampled answers; None if nothing measures it."""
        self.first_token = HistogramRecorder(application.FIRST_TOKEN_SECONDS)
        self.inter_token = HistogramRecorder(application.INTER_TOKEN_SECONDS)
        self.request = HistogramRecorder(application.REQUEST_SECONDS)
        self._phases = (
            HistogramRecorder(application.QUEUE_SECONDS),
            HistogramRecorder(application.PREFILL_SECONDS),
            HistogramRecorder(application.DECODE_SECONDS),
            HistogramRecorder(application.INFERENCE_SECONDS),
        )
        self._sizes = (
            HistogramRecorder(application.REQUEST_PROMPT_TOKENS),
            HistogramRecorder(application.REQUEST_GENERATED_TOKENS),
        )
        self._outcomes = ValueRecorder(application.REQUESTS)
        self.reused = ValueRecorder(application.REUSED_ANSWERS)
        """Requests that shared another's stream (`in_flight`) or were answered from the cache (`cache`)."""
        self._slo = ValueRecorder(application.SLO_REQUESTS)
        self.finished = ValueRecorder(application.FINISHED)
        """Finished choices of answers, by the reason why each finished."""
        self.resumed = ValueRecorder(application.RESUMED_STREAMS)
        """Streams that continued on another replica."""
        self.shadowed = ValueRecorder(application.SHADOW_ANSWERS)
        """Answers to copied requests that were compared with the champion's: `true` if they were equal."""

    def track(self, api: str) -> RequestTracker:
        return RequestTracker(self, api)

    def count_outcome(self, api: str, outcome: Outcome, code: str = "") -> None:
        self._outcomes.add(api, outcome, code)

    def count_slo(self, *, met: bool) -> None:
        self._slo.add("true" if met else "false")

    def observe_phases(self, timing: Timing) -> None:
        """Records how long a request spent in each of the engine's phases: queue, prefill, decode."""
        inference_s = timing.prefill_s + timing.decode_s
        times_s = (timing.queue_s, timing.prefill_s, timing.decode_s, inference_s)
        for phase, seconds in zip(self._phases, times_s, strict=True):
            phase.observe(seconds)

    def observe_sizes(self, prompt_tokens: int, generated_tokens: int) -> None:
        """Records the number of prompt tokens and of generated tokens of an answered request."""
        for size, tokens in zip(self._sizes, (prompt_tokens, generated_tokens), strict=True):
            size.observe(tokens)

    def samples(self) -> Iterator[Sample]:
        labels = (self.endpoint, self.revision)
        for histogram in (self.first_token, self.inter_token, self.request, *self._phases, *self._sizes):
            yield histogram.sample(*labels)
        for values in (self._outcomes, self.reused):
            yield from values.samples(*labels)
        for values in (self._slo, self.finished, self.resumed, self.shadowed):
            yield from values.samples(self.endpoint)
        if (logprob := self.served_logprob()) is not None:
            yield MetricSample(model.SERVED_LOGPROB, logprob, labels)
            yield MetricSample(model.SERVED_PERPLEXITY, math.exp(min(-logprob, _MOST_NATS)), labels)


class RequestTracker:
    """Times one HTTP request. Call `tokens` whenever tokens are sent, and `finish` at the end. Only the first call of
    `finish` counts.
    """

    def __init__(self, metrics: ServingMetrics, api: str) -> None:
        self._metrics = metrics
        self._api = api
        self._slo_s = None if api in _NO_FIRST_TOKEN else metrics.slo_ttft_s
        self._trace_id = TRACE_ID.get()
        self._began_s = self._last_s = time.perf_counter()
        self._seen: set[int] = set()
        self._done = False

    def tokens(self, choice: int, count: int) -> None:
        """Records that `count` new tokens of one choice are sent now."""
        if not count:
            return
        now_s = time.perf_counter()
        if not self._seen:
            self._count_first(now_s)
        elif choice in self._seen:
            self._metrics.inter_token.observe((now_s - self._last_s) / count, count, self._trace_id)
        self._seen.add(choice)
        self._last_s = now_s

    def first_token(self) -> None:
        """Records that the first token of an answer is sent now. Use it if the number of tokens is not known. Only the
        first call counts.
        """
        if not self._seen:
            self._count_first(time.perf_counter())
            self._seen.add(0)

    def _count_first(self, now_s: float) -> None:
        waited_s = now_s - self._began_s
        self._metrics.first_token.observe(waited_s, trace_id=self._trace_id)
        if self._slo_s is not None:
            self._metrics.count_slo(met=waited_s <= self._slo_s)

    def ended(self, reasons: Iterable[str], timings: Iterable[Timing], prompt_tokens: int, generated: int) -> None:
        """Records the finish reason of each choice, the times of each prompt in the engine, and the numbers of prompt
        tokens and generated tokens.
        """
        self._metrics.observe_sizes(prompt_tokens, generated)
        for reason in reasons:
            self._metrics.finished.add(reason)
        for timing in timings:
            self._metrics.observe_phases(timing)

    def finish(self, outcome: Outcome, code: str = "") -> None:
        if self._done:
            return
        self._done = True
        seconds = time.perf_counter() - self._began_s
        self._metrics.request.observe(seconds, trace_id=self._trace_id)
        self._metrics.count_outcome(self._api, outcome, code)
        if self._slo_s is not None and not self._seen:
            is_late = outcome == "aborted" and seconds > self._slo_s
            if is_late or outcome in ("rejected", "error"):
                self._metrics.count_slo(met=False)


def engine_samples(stats: EngineStats, endpoint: str, revision: str = "", replica: str = "") -> Iterator[Sample]:
    """Yields an engine's counters and its current gauges as samples."""
    labels = (endpoint, revision, replica)
    for metric, value in (
        (model.RUNNING, stats.running),
        (model.WAITING, stats.waiting),
        (model.KV_USE_RATIO, _kv_use(stats)),
        (model.STEP_SECONDS, stats.step_ms / 1e3),
        (model.STEPS, stats.steps),
        (model.PROMPT_TOKENS, stats.prompt_tokens),
        (model.GENERATED_TOKENS, stats.generated_tokens),
        (model.CACHED_TOKENS, stats.cached_tokens),
        (model.PREEMPTIONS, stats.preemptions),
        (model.ENGINE_FAILURES, stats.failed),
    ):
        yield MetricSample(metric, value, labels)
    if (disk := stats.disk) is not None:
        for metric, value in (
            (model.DISK_CACHED_TOKENS, disk.hit_tokens),
            (model.DISK_CACHE_BYTES, disk.bytes),
            (model.DISK_CACHE_ON, disk.is_on),
            (model.DISK_EVICTIONS, disk.evictions),
            (model.DISK_SKIPPED, disk.skipped_blocks),
            (model.DISK_DAMAGED, disk.damaged_blocks),
        ):
            yield MetricSample(metric, value, labels)
    for counts in stats.speculation:
        yield MetricSample(model.DRAFTS, counts.drafts, (*labels, counts.source))
        yield MetricSample(model.DRAFT_TOKENS, counts.draft_tokens, (*labels, counts.source))
        yield MetricSample(model.ACCEPTED_TOKENS, counts.accepted_tokens, (*labels, counts.source))


def _kv_use(stats: EngineStats) -> float:
    return 1.0 - stats.free_blocks / stats.num_blocks if stats.num_blocks else 0.0
