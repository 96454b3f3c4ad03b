"""Turns sampled tokens into the outputs that a client gets: chunks of text, usage, ranked samples, or an error."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from raytide.actors.engine.sequence import Sampled, Sequence
from raytide.actors.engine.text.detokenizer import Detokenizer
from raytide.actors.engine.text.stop_strings import StopScanner
from raytide.actors.engine.types import FinishReason, GenChunk, GenRequest, Timing, TokenUsage
from raytide.core.errors import EngineError, RaytideError


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request that ended with an error instead of a last chunk."""

    request_id: str
    error: RaytideError

    @classmethod
    def of(cls, request_id: str, error: Exception) -> RequestFailure:
        """Returns the failure of a request. An error that is not a RaytideError is wrapped in EngineError."""
        if isinstance(error, RaytideError):
            return cls(request_id, error)
        return cls(request_id, EngineError(f"request {request_id} failed: {error!r}."))


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """The whole output of a pooled request: one vector, which is an embedding or the logits of labels."""

    request_id: str
    vector: list[float]
    usage: TokenUsage


Output = GenChunk | PooledOutput | RequestFailure


@dataclass(slots=True, eq=False)
class SampleState:
    """One sample of a request: its sequence, detokenizer and stop strings."""

    seq: Sequence
    text: Detokenizer
    stops: StopScanner
    logprob_sum: float = 0.0
    held: list[GenChunk] = field(default_factory=list)  # until best_of has chosen

    def push_run(self, run: Items[Sampled]) -> tuple[int, str]:
        """Adds the tokens of a step. Returns how many of them count, and the text that can now be sent to the client.
        If a token completes a stop string, the tokens after it do not count, and `stops.stopped` is True.
        """
        text = ""
        for count, sampled in enumerate(run, 1):
            is_last = count == len(run)
            text += self.push(sampled.token, sampled.ends, self.seq.finish_reason if is_last else None)
            if self.stops.stopped:
                return count, text
        return len(run), text

    def push(self, token: int, ends: bool, reason: FinishReason | None = None) -> str:
        """Adds a new token and returns the text that can now be sent to the client. If the token completes a stop
        string, `stops.stopped` becomes True. `reason` is the finish reason if the output ends with this token.
        """
        stops = self.stops
        text = "" if reason == "stop" else stops.push(self.text.push(token))
        if (reason or ends) and not stops.stopped:
            text += stops.push(self.text.flush()) + stops.flush()
        return text

    def replay(self) -> None:
        """Processes the tokens that another engine has already streamed, without sending their text again. Text that
        the other engine held back is held back here as well.
        """
        for token in self.seq.tokens[self.seq.prompt_len :]:
            self.push(token, ends=False)

    @property
    def mean_logprob(self) -> float:
        return self.logprob_sum / max(1, self.seq.output_len)


class RequestState:
    """The samples of one request, and the times at which the request was queued, started and got its first token."""

    def __init__(self, request: GenRequest, samples: list[SampleState], added_s: float) -> None:
        self.request, self.samples = request, samples
        self._count = request.sampling.n
        self._is_ranked = len(samples) > request.sampling.n
        running = [sample.seq for sample in samples if sample.seq.finish_reason is None]
        self.parent = running[0]  # the first to compute the prompt here
        self._open = len(running)
        self._added_s = added_s
        self.is_prompt_imported = False
        """True for a request whose KV came from another engine."""
        self._started_s: float | None = None
        self._first_token_s: float | None = None

    def start(self, now_s: float) -> None:
        """Records the time at which the request's first step starts. Later calls change nothing."""
        if self._started_s is None:
            self._started_s = now_s

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_done(self) -> bool:
        """True once all samples have ended by themselves. An abort does not make it True."""
        return self._open == 0

    def emit(self, sample: SampleState, run: Items[Sampled], text: str, now_s: float) -> list[GenChunk]:
        """Returns the chunks to send for a sample's new tokens."""
        seq = sample.seq
        if self._first_token_s is None:
            self._first_token_s = now_s
        tokens = [sampled.token for sampled in run]
        chunk = GenChunk(
            self.request_id, tokens, text, seq.finish_reason, index=seq.index, stop=sample.stops.stopped_by
        )
        logprobs = tuple(sampled.logprobs for sampled in run if sampled.logprobs is not None)
        sample.logprob_sum += sum(each.logprob for each in logprobs)
        if logprobs and seq.params.logprobs is not None:
            chunk = replace(chunk, logprobs=logprobs)
        if seq.params.prompt_logprobs is not None and seq.output_len == len(run):
            # A prompt of one token has no computed log probabilities.
            chunk = replace(chunk, prompt_logprobs=tuple(seq.prompt_logprobs or (None,)))
        if seq.finish_reason is not None:
            self._open -= 1
        if self._is_ranked:
            sample.held.append(chunk)
            return self._best(now_s) if self.is_done else []
        return [self._closed(chunk, now_s)] if self.is_done else [chunk]

    def abort(self, now_s: float) -> list[GenChunk]:
        """Returns the last chunks of samples that have just been aborted."""
        shown = self.samples[: self._count]
        chunks = [
            GenChunk(self.request_id, [], "", "abort", index=sample.seq.index)
            for sample in shown
            if self._is_ranked or sample.seq.finish_reason == "abort"
        ]
        return [*chunks[:-1], self._closed(chunks[-1], now_s)]

    def _best(self, now_s: float) -> list[GenChunk]:
        """Returns one chunk for each of the samples with the highest mean log probability, best first, once all have
        ended.
        """
        ranked = sorted(self.samples, key=lambda sample: sample.mean_logprob, reverse=True)[: self._count]
        chunks = [_merged(sample.held, index) for index, sample in enumerate(ranked)]
        chunks[0] = replace(chunks[0], prompt_logprobs=self.samples[0].held[0].prompt_logprobs)
        return [*chunks[:-1], self._closed(chunks[-1], now_s)]

    def _closed(self, chunk: GenChunk, now_s: float) -> GenChunk:
        started_s = self._started_s or now_s
        first_s = self._first_token_s or now_s
        output_len = sum(sample.seq.output_len for sample in self.samples)
        return replace(
            chunk,
            usage=TokenUsage(self.parent.prompt_len, output_len, self.parent.num_cached),
            timing=Timing(started_s - self._added_s, max(0.0, first_s - started_s), now_s - first_s),
        )


def _merged(chunks: list[GenChunk], index: int) -> GenChunk:
    last = chunks[-1]
    return replace(
        last,
        index=index,
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        text="".join(chunk.text for chunk in chunks),
        logprobs=None if last.logprobs is None else tuple(each for chunk in chunks for each in chunk.logprobs or ()),
        prompt_logprobs=None,
    )
