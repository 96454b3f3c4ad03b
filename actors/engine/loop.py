"""The engine without threads: requests in, one `step` at a time, text out. `native.py` runs it in a thread, `llm.py`
in line.

A step is plan, execute, commit, detokenize. A failure ends the request it belongs to and no other.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raytide.actors.engine.base import check_features
from raytide.actors.engine.blocks import BlockPool
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.core import EngineInfo, EngineStats, Feature, GenChunk, GenRequest, Timing, Usage
from raytide.actors.engine.detokenizer import Detokenizer, Vocabulary
from raytide.actors.engine.families import read_architecture
from raytide.actors.engine.runner import Runner
from raytide.actors.engine.scheduler import Scheduler
from raytide.actors.engine.sequence import Chunk, Sampled, Sequence
from raytide.actors.engine.stops import StopScanner
from raytide.actors.engine.tokenizer import Tokenizer
from raytide.core.errors import ConflictError, EngineError, OverloadedError, RaytideError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EngineLoop", "Failure", "Output"]

_log = logging.getLogger(__name__)

_FEATURES: frozenset[Feature] = frozenset(
    {"logprobs", "penalties", "prefix_cache", "prompt_logprobs", "sampling", "stop_strings"}
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended with an error instead of a last chunk."""

    request_id: str
    error: RaytideError

    @classmethod
    def of(cls, request_id: str, error: Exception) -> Failure:
        """Errors that raytide raises on purpose go through as they are."""
        if isinstance(error, RaytideError):
            return cls(request_id, error)
        return cls(request_id, EngineError(f"request {request_id} failed: {error!r}."))


Output = GenChunk | Failure


@dataclass(slots=True)
class _Request:
    """What the loop keeps beside the scheduler's sequence."""

    seq: Sequence
    text: Detokenizer
    stops: StopScanner
    added_s: float
    started_s: float | None = None
    first_token_s: float | None = None


class EngineLoop:
    """Not thread-safe: one thread adds, steps and aborts."""

    def __init__(self, config: EngineConfig) -> None:
        model_dir = Path(config.model_dir)
        arch = read_architecture(model_dir)
        self.tokenizer = Tokenizer(model_dir)
        self._vocabulary = Vocabulary(self.tokenizer)
        self._vocab_size = arch.vocab_size
        self._eos = self.tokenizer.eos_token_ids | set(arch.eos_token_ids)
        self._runner = Runner(config, arch)
        self._pool = BlockPool(self._runner.num_blocks, self._runner.block_size, self._runner.num_host_blocks)
        self._scheduler = Scheduler(
            self._pool,
            max_running=config.max_running,
            max_batch_tokens=config.max_batch_tokens,
            prefix_cache=config.prefix_cache,
        )
        self._max_waiting = config.max_waiting
        self._seed = secrets.randbits(62) if config.seed is None else config.seed
        self._requests: dict[str, _Request] = {}
        self._counters = EngineStats(num_blocks=self._pool.num_blocks)
        self.info = EngineInfo(
            model=model_dir.resolve().name,
            backend="native",
            max_model_len=self._runner.max_len,
            block_size=self._pool.block_size,
            num_blocks=self._pool.num_blocks,
            features=_FEATURES if config.prefix_cache else _FEATURES - {"prefix_cache"},
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, request: GenRequest, prompt: Items[int]) -> None:
        """Queue a request whose prompt is already token ids. Raises UsageError, ConflictError or OverloadedError."""
        check_features(request, self.info.features, self.info.backend)
        now_s = time.monotonic()
        seq = self._sequence(request, prompt, now_s)
        if request.request_id in self._requests:
            raise ConflictError(
                f"request {request.request_id} is already running.", hint="Give each request its own id."
            )
        if len(self._scheduler.waiting) >= self._max_waiting:
            raise OverloadedError(f"{self._max_waiting} requests are waiting already.", hint="Retry later.")
        self._scheduler.add(seq)
        stops = StopScanner(request.sampling.stop)
        self._requests[seq.seq_id] = _Request(seq, self._vocabulary.stream(), stops, now_s)

    def step(self) -> list[Output]:
        """Advance the running requests by one step of the model, and say what that added to each."""
        began = time.monotonic()
        plan = self._scheduler.plan(began)
        for seq in plan.preempted:
            self._runner.release(seq)
        self._runner.move(plan)
        for chunk in plan.chunks:
            request = self._requests[chunk.seq.seq_id]
            request.started_s = request.started_s or began
        failures: dict[str, Exception] = {}
        sampled = self._execute(plan.chunks, failures)
        for seq_id in [seq_id for seq_id, each in sampled.items() if each.token < 0]:
            failures[seq_id] = sampled.pop(seq_id).error or ArithmeticError("the model's logits are not finite")
        outputs: list[Output] = [self._fail(self._requests[seq_id].seq, error) for seq_id, error in failures.items()]
        self._scheduler.commit(plan, {seq_id: each.token for seq_id, each in sampled.items()})
        now = time.monotonic()
        outputs += [self._advance(self._requests[seq_id], each, now) for seq_id, each in sampled.items()]
        counters = self._counters
        counters.steps += 1
        counters.step_ms += ((now - began) * 1e3 - counters.step_ms) * (0.1 if counters.steps > 1 else 1.0)
        return outputs

    def abort(self, request_id: str) -> GenChunk | None:
        """End a request now; its last chunk, or None if it is not here."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._scheduler.finish(request.seq, "abort")
        return self._close(request, [], "", time.monotonic())

    def fail_all(self, error: Exception) -> list[Output]:
        """End every request with an error; for a failure that belongs to no single one."""
        return [self._fail(request.seq, error) for request in list(self._requests.values())]

    def prompt_logits(self, tokens: Items[int]) -> Tensor:
        """float32 [T, V]: what follows each token of a prompt. Raises UsageError as `add` does."""
        return self._runner.prompt_logits(self._checked("logits", tokens))

    def stats(self) -> EngineStats:
        """A snapshot."""
        return replace(
            self._counters,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_blocks=self._pool.num_free,
            preemptions=self._scheduler.preemptions,
        )

    def _sequence(self, request: GenRequest, prompt: Items[int], now_s: float) -> Sequence:
        params, limit = request.sampling, self._runner.max_len
        tokens = self._checked(f"request {request.request_id}", prompt)
        self._seed += 1
        return Sequence(
            seq_id=request.request_id,
            tokens=tokens,
            prompt_len=len(tokens),
            params=params,
            max_len=limit if params.max_tokens is None else min(limit, len(tokens) + params.max_tokens),
            stop_token_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
            seed=self._seed if params.seed is None else params.seed,
            priority=request.priority,
            deadline_s=math.inf if request.deadline_s is None else now_s + request.deadline_s,
            arrival_s=now_s,
            salt=request.cache_salt.encode(),
            reads_cache=params.prompt_logprobs is None,
        )

    def _checked(self, who: str, prompt: Items[int]) -> list[int]:
        """A prompt of a length that the model takes, of tokens that it knows."""
        tokens, limit = list(prompt), self._runner.max_len
        if not 0 < len(tokens) < limit:
            raise UsageError(
                f"{who}: prompt of {len(tokens)} tokens; the engine takes 1 to {limit - 1}.",
                hint="Send a shorter prompt, but not an empty one.",
            )
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise UsageError(
                f"{who}: a token id is outside 0 to {self._vocab_size - 1}.", hint="Use the tokenizer of this model."
            )
        return tokens

    def _execute(self, chunks: list[Chunk], failures: dict[str, Exception]) -> dict[str, Sampled]:
        """Run the step; when it fails, run its halves, down to the request at fault (or to a batch that fits in
        memory).
        """
        if not chunks:
            return {}
        try:
            return self._runner.execute(chunks)
        except Exception as error:
            if len(chunks) == 1:
                failures[chunks[0].seq.seq_id] = error
                return {}
            half = len(chunks) // 2
            return self._execute(chunks[:half], failures) | self._execute(chunks[half:], failures)

    def _advance(self, request: _Request, sampled: Sampled, now: float) -> Output:
        seq, stops, token = request.seq, request.stops, sampled.token
        is_first = request.first_token_s is None
        try:
            request.first_token_s = request.first_token_s or now
            text = "" if seq.finish_reason == "stop" else stops.push(request.text.push(token))
            if (seq.finish_reason or sampled.ends) and not stops.stopped:
                text += stops.push(request.text.flush()) + stops.flush()
            if stops.stopped or sampled.ends:
                self._scheduler.finish(seq, "stop")
        except Exception as error:
            return self._fail(seq, error)
        chunk = (
            GenChunk(seq.seq_id, [token], text)
            if seq.finish_reason is None
            else self._close(request, [token], text, now)
        )
        if sampled.logprobs is not None:
            chunk = replace(chunk, logprobs=(sampled.logprobs,))
        if is_first and seq.params.prompt_logprobs is not None:
            chunk = replace(chunk, prompt_logprobs=tuple(seq.prompt_logprobs))
        return chunk

    def _close(self, request: _Request, tokens: list[int], text: str, now: float) -> GenChunk:
        seq, started = request.seq, request.started_s or now
        first = request.first_token_s or now
        self._forget(seq)
        return GenChunk(
            seq.seq_id,
            tokens,
            text,
            seq.finish_reason,
            Usage(seq.prompt_len, seq.output_len, seq.num_cached),
            Timing(started - request.added_s, max(0.0, first - started), now - first),
        )

    def _fail(self, seq: Sequence, error: Exception) -> Failure:
        _log.error("request %s failed", seq.seq_id, exc_info=error)
        # What a broken computation wrote must not be found by the next owner of these blocks.
        self._runner.scrub(self._pool.discard(seq.block_ids))
        self._scheduler.finish(seq, "error")
        self._counters.failed += 1
        self._forget(seq)
        return Failure.of(seq.seq_id, error)

    def _forget(self, seq: Sequence) -> None:
        del self._requests[seq.seq_id]
        self._runner.release(seq)
        self._counters.finished += 1
        self._counters.prompt_tokens += seq.prompt_len
        self._counters.generated_tokens += seq.output_len
        self._counters.cached_tokens += seq.num_cached
