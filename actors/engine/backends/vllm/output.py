"""The output of one sample that vLLM computes. vLLM returns token ids. This module converts them to text with raytide's
detokenizer, and applies the stop strings.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from raytide.actors.engine.backends.vllm.request import token_logprobs
from raytide.actors.engine.text.detokenizer import Detokenizer
from raytide.actors.engine.text.stop_strings import StopScanner
from raytide.actors.engine.types import FinishReason, GenChunk, GenRequest, SampleProgress, Timing, check_progress
from raytide.core.errors import EngineError

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}


class SampleOutput:
    def __init__(self, request: GenRequest, index: int, prompt: list[int], text: Detokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached = 0
        self.timing: Timing | None = None
        self.finish_reason: FinishReason | None = None
        self.had_ended = False  # on the engine that it is resumed from
        self._request = request
        self._prompt = prompt
        self._text = text
        self._stops = StopScanner.of(request.sampling)
        if index < len(request.resume):
            self._replay(request.resume[index])

    def _replay(self, done: SampleProgress) -> None:
        """Continues behind the tokens that another engine has streamed with their text. Raises UsageError if the tokens
        complete the output although `done` has no finish reason.
        """
        self.num_tokens, self.finish_reason = len(done.token_ids), done.finish_reason
        self.had_ended = done.finish_reason is not None
        if not self.had_ended:
            for token in done.token_ids:
                self._stops.push(self._text.push(token))
            check_progress(self._request, self.index, is_over=self._stops.stopped)

    def take(self, output: Any) -> GenChunk:
        """Returns the chunk for one output of vLLM. The output has one or more new tokens."""
        part = output.outputs[0]
        tokens, reason = list(part.token_ids), self._reason(part.finish_reason)
        text = ""
        for place, token in enumerate(tokens):
            is_end = reason == "stop" and place == len(tokens) - 1  # an end token has no text
            text += "" if is_end else self._stops.push(self._text.push(token))
            if self._stops.stopped:
                tokens, reason = tokens[: place + 1], "stop"
        if reason and not self._stops.stopped:
            text += self._stops.push(self._text.flush()) + self._stops.flush()
            reason = "stop" if self._stops.stopped else reason
        self.num_tokens += len(tokens)
        self.num_cached = min(output.num_cached_tokens or self.num_cached, len(self._prompt))
        self.finish_reason = reason
        if reason:
            self.timing = _timing(getattr(output, "metrics", None))
        return GenChunk(
            self._request.request_id,
            tokens,
            text,
            reason,
            index=self.index,
            logprobs=self._logprobs(part.logprobs, tokens),
            prompt_logprobs=self._prompt_logprobs(output.prompt_logprobs),
            stop=self._stops.stopped_by,
        )

    def _reason(self, reason: str | None) -> FinishReason | None:
        if reason is None:
            return None
        if reason not in _REASONS:
            raise EngineError(f"request {self._request.request_id} failed inside vLLM ({reason}).")
        return _REASONS[reason]

    def _logprobs(self, entries: Any, tokens: list[int]) -> Any:
        count = self._request.sampling.logprobs
        if count is None or not entries:
            return None
        return tuple(token_logprobs(entry, token, count) for entry, token in zip(entries, tokens, strict=False))

    def _prompt_logprobs(self, entries: Any) -> Any:
        count = self._request.sampling.prompt_logprobs
        if count is None or not entries:
            return None
        pairs = zip(entries, self._prompt, strict=True)
        return tuple(None if entry is None else token_logprobs(entry, token, count) for entry, token in pairs)


def _timing(metrics: Any) -> Timing | None:
    """Returns the times between the moments that vLLM's core recorded, 0 for phases that were not reached; None without
    a record.
    """
    if metrics is None:
        return None
    moments = [metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
    queue, prefill, decode = (
        max(0.0, after - before) if after and before else 0.0 for before, after in pairwise(moments)
    )
    return Timing(queue, prefill, decode)
