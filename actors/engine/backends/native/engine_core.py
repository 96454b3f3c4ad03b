"""The engine without threads: it takes requests, advances them one `step` at a time and returns text. `engine.py` runs
it in a thread of its own, and `llm.py` runs it in the caller's thread. `operations.py` has the engine's other commands.

A step is plan, move, execute, commit, detokenize. A failure ends only the request that caused it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raytide.actors.engine.backends.native import disk_cache
from raytide.actors.engine.backends.native.features import native_features
from raytide.actors.engine.backends.native.input_processor import InputProcessor, Prepared, salt_of
from raytide.actors.engine.backends.native.output_processor import (
    Output,
    PooledOutput,
    RequestFailure,
    RequestState,
    SampleState,
)
from raytide.actors.engine.base import check_features
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.kv_cache.disk_tier import move_blocks
from raytide.actors.engine.limits import MAX_PROMPT_LOGITS, MAX_PROMPT_LOGPROB_ROWS
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.model.pooling import pooled_vector
from raytide.actors.engine.model.vision.pixels import ImageProcessor
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.scheduler.speculation.speculator import Speculator
from raytide.actors.engine.scheduler.step_cost import StepCost
from raytide.actors.engine.sequence import PooledPrompt, Sampled, Sequence, StepPlan
from raytide.actors.engine.text.detokenizer import Vocabulary
from raytide.actors.engine.text.stop_strings import StopScanner
from raytide.actors.engine.text.tokenizer import Tokenizer
from raytide.actors.engine.types import (
    EngineInfo,
    EngineState,
    EngineStats,
    GenRequest,
    TokenUsage,
    as_request_error,
    check_progress,
)
from raytide.actors.models.content import WeightsSource
from raytide.actors.models.families import read_architecture
from raytide.actors.models.quantized.gguf.packaged_models import packaged_path
from raytide.core.errors import ConflictError, EngineDeadError, NotFoundError, OverloadedError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from raytide.actors.engine.model.parallel.launcher import LocalMembers

_log = logging.getLogger(__name__)

_MOVES_MAY_FAIL = 3  # times in a row
_FAILURES_ALONE = 3
"""The number of consecutive steps in which every request failed, after which the model itself is tested."""


class EngineCore:
    """The native engine without threads. It is not thread-safe. `state` says whether it serves, is paused or sleeps."""

    def __init__(self, config: EngineConfig, launcher: LocalMembers | None = None) -> None:
        model_dir = Path(packaged_path(config.model_dir) or config.model_dir)
        arch = read_architecture(model_dir, serves=True)
        self.tokenizer = Tokenizer(model_dir, arch.vision)
        self.state: EngineState = "serving"
        self.weights = WeightsSource.at(model_dir)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.runner = ModelRunner(config, arch, launcher)
        self._cost = StepCost(self.runner.row_cost)
        self.speculator = Speculator.of(config.speculation, self.runner.allowed, self._cost, self.runner.draft_model)
        self.disk = disk_cache.open_disk_tier(config, self.runner, self.weights)
        cache = self.runner.cache
        self.pool = BlockPool(cache.num_blocks, self.runner.block_size, cache.num_host_blocks, self.disk)
        self.scheduler = Scheduler(
            self.pool,
            max_running=config.max_running,
            max_batch_tokens=self.runner.batch_tokens,
            prefix_cache=config.prefix_cache,
            policy=config.policy,
            ageing_s=config.ageing_s,
            swap_cost=self.runner.swap_cost(),
            max_logprob_rows=max(1, min(MAX_PROMPT_LOGPROB_ROWS, MAX_PROMPT_LOGITS // arch.vocab_size)),
            drafter=self.speculator,
            team_slowdown=config.team_slowdown,
            step_seconds=self._cost.seconds,
        )
        self.input_processor = InputProcessor(
            self.tokenizer,
            max_len=self.runner.max_len,
            max_samples=config.max_running,
            vocab_size=arch.vocab_size,
            eos=frozenset(self.tokenizer.eos_token_ids | set(arch.eos_token_ids)),
            seed=config.seed,
            any_whitespace=config.any_whitespace,
            images=None if arch.vision is None else ImageProcessor(model_dir, arch.vision),
        )
        self.config, self._max_waiting = config, config.max_waiting
        self._requests: dict[str, RequestState] = {}
        self._samples: dict[str, tuple[RequestState, SampleState]] = {}  # by sequence id
        self._counters = EngineStats(num_blocks=self.pool.num_blocks)
        self._outputs: list[Output] = []
        self.adapter_contents: dict[str, str] = {}  # a hash of each loaded adapter, by name
        self._failed_moves = self._fruitless_steps = 0
        self.info = EngineInfo(
            model=model_dir.resolve().name,
            backend="native",
            max_model_len=self.runner.max_len,
            block_size=self.pool.block_size,
            num_blocks=self.pool.num_blocks,
            features=native_features(config, arch),
            weights_version=self.weights.version,
            chat=self.tokenizer.chat_format,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            quantization=self.runner.quantization,
            streamed_layers=self.runner.streamed_layers,
            num_labels=arch.num_labels,
            local_disk="" if self.disk is None else self.disk.counts.path,
        )

    @property
    def has_work(self) -> bool:
        return self.state == "serving" and self.scheduler.has_work

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, request: GenRequest, prompt: Items[int], prepared: Prepared | None = None) -> None:
        """Queues a request whose prompt is already tokenized. Raises UsageError, ConflictError or OverloadedError.
        Raises NotFoundError for an adapter that is not loaded.
        """
        now_s = time.monotonic()
        if self.info.num_labels:
            raise UsageError(f"{self.info.model} classifies: it generates no text.", hint="Use another model for that.")
        check_features(request, self.info.features, self.info.backend)
        parent, *children = seqs = self.input_processor.sequences(
            request, prompt, self.salt(request.lora, request.cache_salt), now_s, prepared
        )
        self.check_room(seqs)
        answer = self.new_state(request, seqs, now_s)
        if request.resume:  # as evicted samples do, each computes its own tokens
            for seq in seqs:
                if seq.finish_reason is None:
                    self.scheduler.add(seq)
        else:
            self.scheduler.add(parent)
            for child in children:
                self.scheduler.fork(parent, child)
        self.track_outputs(answer)

    def add_pooled(self, request: GenRequest, prompt: Items[int], pooled: PooledPrompt) -> None:
        """Queues a prompt whose output is a vector. Raises the same errors as `add`."""
        now_s = time.monotonic()
        salt = self.salt(request.lora, request.cache_salt)
        seq = self.input_processor.pooled_sequence(request, prompt, salt, now_s, pooled)
        self.check_room([seq])
        self.scheduler.add(seq)
        self.track_outputs(self.new_state(request, [seq], now_s))

    def salt(self, lora: str | None, cache_salt: str) -> bytes:
        """Returns the salt of a request's block hashes. Raises NotFoundError for an adapter that is not loaded."""
        adapter = "" if lora is None else self.runner.lora_id(lora)
        return salt_of(self.weights.version, adapter, cache_salt)

    def salt_again(self) -> None:
        """Renews the salts of all requests. Call it after a change of weights."""
        for answer, sample in self._samples.values():
            sample.seq.salt = self.salt(answer.request.lora, answer.request.cache_salt)

    def check_room(self, seqs: Items[Sequence]) -> None:
        """Raises ConflictError if a request id is in use. Raises OverloadedError if the queue is full."""
        for seq in seqs:
            if seq.seq_id in self._samples:
                raise ConflictError(
                    f"request {seq.request_id} is already running.", hint="Give each request its own id."
                )
        there = len(self.scheduler.running) + len(self.scheduler.waiting)  # what was just added waits for the next step
        if there >= self.config.max_running + self._max_waiting:
            raise OverloadedError(f"{self._max_waiting} requests are waiting already.", hint="Retry later.")

    def new_state(self, request: GenRequest, seqs: Items[Sequence], now_s: float) -> RequestState:
        """Returns a new output state for a request. In a resumed request, the existing tokens count as sent already.
        Raises UsageError if these tokens contain a stop string.
        """
        samples = [SampleState(seq, self.vocabulary.stream(), StopScanner.of(request.sampling)) for seq in seqs]
        for index, sample in enumerate(samples):
            if request.resume and sample.seq.finish_reason is None:
                sample.replay()
                check_progress(request, index, is_over=sample.stops.stopped)
        return RequestState(request, samples, now_s)

    def track_outputs(self, answer: RequestState) -> None:
        """Starts to collect the output of a request whose sequences are in the scheduler."""
        self._requests[answer.request_id] = answer
        for sample in answer.samples:
            self._samples[sample.seq.seq_id] = answer, sample

    def drain_outputs(self) -> list[Output]:
        """Returns the outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def step(self) -> list[Output]:
        """Advances the running requests by one step of the model and returns the outputs."""
        began = time.monotonic()
        plan = self.scheduler.plan(began)
        for seq in plan.preempted:
            self.runner.release(seq)
        if not self._move(plan):
            return self.drain_outputs()
        for chunk in plan.chunks:
            self._samples[chunk.seq.seq_id][0].start(began)
        sampled, failures = self.runner.execute_isolating_failures(plan.chunks)
        for seq_id in [seq_id for seq_id, run in sampled.items() if run[0].token < 0]:
            failures[seq_id] = sampled.pop(seq_id)[0].error or ArithmeticError("the model's logits are not finite")
        for seq_id, error in failures.items():
            self._fail(seq_id, error)
        pooled = [chunk for chunk in plan.chunks if chunk.seq.pooled is not None]
        self._check_model(bool(sampled) or any(each.seq.seq_id not in failures for each in pooled), bool(failures))
        whole = [each.seq for each in pooled if each.start + each.length == each.seq.prompt_len]
        vectors = [(seq, vector) for seq in whole if (vector := self._vector(seq)) is not None]
        self.scheduler.commit(plan, {seq_id: [each.token for each in run] for seq_id, run in sampled.items()})
        now = time.monotonic()
        for seq_id, run in sampled.items():
            self._advance(seq_id, run, now)
        for seq, vector in vectors:
            self._outputs.append(PooledOutput(seq.request_id, vector, TokenUsage(seq.prompt_len, 0)))
            self._forget(self._samples[seq.seq_id][0])
        if not failures:
            if plan.is_decode:
                self._cost.observe(plan.num_tokens, now - began)
            if self.speculator is not None:
                self.speculator.observe(plan, lambda seq_id: len(sampled[seq_id]) - 1)
        counters = self._counters
        counters.steps += (self.disk is not None and self.disk.after_step(plan, now - began)) or bool(plan.chunks)
        counters.step_ms += ((now - began) * 1e3 - counters.step_ms) * (0.1 if counters.steps > 1 else 1.0)
        return self.drain_outputs()

    def abort(self, request_id: str) -> bool:
        """Ends all samples of a request now. Returns False if there is no such request."""
        answer = self._requests.get(request_id)
        if answer is None:
            return False
        for sample in answer.samples:
            if sample.seq.finish_reason is None:
                self.scheduler.finish(sample.seq, "abort")
        self._forget(answer)
        self._outputs += answer.abort(time.monotonic())
        return True

    def fail_all(self, error: Exception) -> None:
        """Ends every request with an error, after a failure that no single request has caused."""
        for request_id in self.request_ids:
            self._fail(request_id, error)
        self.scheduler.invalidate()  # what was computed cannot be trusted

    def close(self) -> None:
        """Ends the engine's other processes and threads. Idempotent. No method may be called after it."""
        if self.disk is not None:
            self.disk.close()
        self.runner.close()

    def prompt_logits(self, tokens: Items[int]) -> Tensor:
        """Returns float32 logits [T, V]: one row for each token of a prompt. Raises UsageError for a bad prompt."""
        return self.runner.prompt_logits(self.input_processor.checked("logits", tokens))

    def stats(self) -> EngineStats:
        """Returns the engine's counters, and the present numbers of requests and free blocks."""
        return replace(
            self._counters,
            state=self.state,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_blocks=self.pool.num_free,
            preemptions=self.scheduler.preemptions,
            adapters=dict(self.adapter_contents),
            weights_version=self.weights.version,
            speculation=self.speculator.counts if self.speculator is not None else (),
            disk=None if self.disk is None else self.disk.counts,
        )

    def adapter_of(self, seq: Sequence) -> str | None:
        """Returns a sequence's adapter as `name@content-hash`. All engines use the same text for the same adapter. None
        means the base model.
        """
        return None if seq.lora is None else f"{seq.lora}@{self.adapter_contents[seq.lora]}"

    def uses_lora(self, name: str) -> bool:
        return any(sample.seq.lora == name for _, sample in self._samples.values())

    def request_state(self, request_id: str) -> RequestState:
        """Returns the output state of a request. Raises NotFoundError for an unknown request."""
        if request_id not in self._requests:
            raise NotFoundError(f"no request {request_id} is here.", hint="It may have ended.")
        return self._requests[request_id]

    def _move(self, plan: StepPlan) -> bool:
        """Moves the plan's blocks. After a failure no block's content can be trusted: then it returns False, and
        everything is computed again from the tokens.
        """
        try:
            move_blocks(plan, self.runner.cache, self.disk)
        except EngineDeadError:
            raise
        except BaseException as error:
            as_request_error(error)
            self._failed_moves += 1
            if self._failed_moves > _MOVES_MAY_FAIL:
                raise
            _log.exception("KV blocks could not be moved; all requests are computed again")
            self.scheduler.invalidate()
            return False
        self._failed_moves = 0
        return True

    def _check_model(self, has_tokens: bool, has_failures: bool) -> None:
        """Distinguishes bad requests from a broken device: after several steps in which all requests failed, it
        computes a single token on its own. Raises EngineDeadError when that fails too."""
        if has_tokens or not has_failures:
            self._fruitless_steps = 0 if has_tokens else self._fruitless_steps
            return
        self._fruitless_steps += 1
        if self._fruitless_steps < _FAILURES_ALONE:
            return
        self._fruitless_steps = 0
        try:
            self.runner.prompt_logits([0])
        except BaseException as error:
            raise EngineDeadError(
                f"the model computes nothing any more: {as_request_error(error)!r}.",
                hint="Its replica is to be replaced.",
            ) from error

    def _advance(self, seq_id: str, run: Items[Sampled], now_s: float) -> None:
        if seq_id not in self._samples:  # a sibling's failure has ended its request
            return
        answer, sample = self._samples[seq_id]
        seq = sample.seq
        try:
            count, text = sample.push_run(run)
        except BaseException as error:
            self._fail(seq_id, as_request_error(error))
            return
        run, dropped = run[:count], len(run) - count
        if run[-1].ends or sample.stops.stopped:
            self.scheduler.finish(seq, "stop")
        del seq.tokens[len(seq.tokens) - dropped :]
        self._counters.generated_tokens += len(run)
        self._outputs += answer.emit(sample, run, text, now_s)
        if seq.finish_reason is not None:
            self.runner.release(seq)
            if answer.is_done:
                self._forget(answer)

    def _vector(self, seq: Sequence) -> list[float] | None:
        """Returns the vector of a computed prompt; None if the request has ended, or ends here with an error."""
        try:
            return pooled_vector(seq) if seq.finish_reason is None else None
        except BaseException as error:  # the sequence still has its blocks: `_fail` zeroes them
            self._fail(seq.seq_id, as_request_error(error))
        return None

    def _fail(self, seq_id: str, error: Exception) -> None:
        """Ends the request that a sequence belongs to, and no other."""
        if seq_id not in self._samples:
            return
        answer = self._samples[seq_id][0]
        if isinstance(error, UsageError):  # found only while it ran, as with a grammar that is too complex
            _log.info("request %s was refused: %s", answer.request_id, error)
        else:
            _log.error("request %s failed", answer.request_id, exc_info=error)
        for sample in answer.samples:
            if sample.seq.finish_reason is None:
                # What a broken computation wrote must not be found by the next owner of these blocks.
                self.runner.cache.zero_blocks(self.pool.discard(sample.seq.block_ids))
                self.scheduler.finish(sample.seq, "error")
        self._counters.failed += 1
        self._forget(answer)
        self._outputs.append(RequestFailure.of(answer.request_id, error))

    def _forget(self, answer: RequestState) -> None:
        del self._requests[answer.request_id]
        for sample in answer.samples:
            del self._samples[sample.seq.seq_id]
            self.runner.release(sample.seq)
            if self.speculator is not None:
                self.speculator.forget(sample.seq)
        self._counters.finished += 1
        if not answer.is_prompt_imported:  # the engine that has computed it counts it
            self._counters.prompt_tokens += answer.parent.prompt_len
            self._counters.cached_tokens += answer.parent.num_cached
