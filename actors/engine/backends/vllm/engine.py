"""vLLM behind the `Engine` protocol: token ids in and out, with raytide's own tokenizer and stop strings.

vLLM's core runs in a separate process, as vLLM's AsyncLLM requires. This module admits, counts and streams requests.
The core's process ends at `shutdown`, or when this process ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from raytide.actors.engine.backends.vllm.config import VllmConfig
from raytide.actors.engine.backends.vllm.launch import VllmCore, launch
from raytide.actors.engine.backends.vllm.output import SampleOutput
from raytide.actors.engine.backends.vllm.request import (
    call,
    check_request,
    died,
    lost_on_resume,
    sample_id,
    tokens_prompt,
    translated,
)
from raytide.actors.engine.backends.vllm.weights import ServedWeights
from raytide.actors.engine.base import Engine, check_features, check_prompt, check_resume, refuse
from raytide.actors.engine.model.lora import adapter_digest
from raytide.actors.engine.model.parallel.launcher import LocalMembers
from raytide.actors.engine.text.detokenizer import Vocabulary
from raytide.actors.engine.text.tokenizer import Tokenizer
from raytide.actors.engine.types import (
    PLAIN_PROMPT,
    EngineInfo,
    EngineStats,
    Feature,
    GenChunk,
    GenRequest,
    Message,
    PromptOptions,
    Timing,
    TokenUsage,
    as_request_error,
)
from raytide.actors.models.model_config import as_ids, read_json
from raytide.core.errors import (
    ConfigError,
    ConflictError,
    DataError,
    EngineError,
    NotFoundError,
    OverloadedError,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Live:
    """A request in flight."""

    request: GenRequest
    prompt: list[int]
    samples: list[SampleOutput]

    @property
    def first(self) -> SampleOutput:
        """The first sample that this engine runs: samples that had ended before a resume are skipped."""
        return next(each for each in self.samples if not each.had_ended)

    @property
    def num_running(self) -> int:
        return sum(each.finish_reason is None for each in self.samples)


class VllmEngine(Engine):
    """An engine that runs vLLM, behind the `Engine` protocol.

    Use it from the event loop that called `start`. `launch` is the function that starts vLLM; tests pass a function
    that returns a running vLLM. If `launcher` is set, the model is spread over `members` nodes."""

    backend = "vllm"

    def __init__(
        self,
        config: VllmConfig,
        *,
        launch: Callable[..., VllmCore] = launch,
        launcher: LocalMembers | None = None,
        members: int = 1,
    ) -> None:
        self._config = config
        self._nodes = () if launcher is None else (launcher, members)
        self._name = Path(config.model_dir).resolve().name
        self._launch = launch
        self._core: VllmCore | None = None
        self._live: dict[str, _Live] = {}
        self._weights: ServedWeights | None = None
        self._loras: dict[str, tuple[Any, str]] = {}  # each with its files' digest
        self._loras_loaded = 0
        self._counters = EngineStats()
        self._idle = asyncio.Event()
        self._idle.set()
        self._started = self._accepting = False

    async def start(self) -> EngineInfo:
        if self._started:
            raise ConflictError("this engine has been started already.", hint="Make a new one.")
        self._started = True
        model_dir = Path(self._config.model_dir)
        self._tokenizer = Tokenizer(model_dir)
        self._vocabulary = Vocabulary(self._tokenizer)
        ends = as_ids(read_json(model_dir / "config.json").get("eos_token_id"))
        self._end_ids = self._tokenizer.eos_token_ids | frozenset(ends)
        core = self._core = await asyncio.to_thread(self._launch, self._config, *self._nodes)
        try:
            await self._warm_up(core)
        except BaseException:
            await self.shutdown()
            raise
        if "weights_swap" in core.features:
            self._weights = await asyncio.to_thread(ServedWeights, core, model_dir)
        self._counters.num_blocks = core.num_blocks
        self._accepting = True
        return EngineInfo(
            model=self._name,
            backend=self.backend,
            max_model_len=core.max_model_len,
            block_size=core.block_size,
            num_blocks=core.num_blocks,
            features=core.features,
            weights_version=self._weights_version,
            chat=self._tokenizer.chat_format,
            max_running=self._config.max_running,
            max_waiting=self._config.max_waiting,
        )

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        prompt = await self.tokenize(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
        core = self._admit(request, prompt)
        samples = [
            SampleOutput(request, index, prompt, self._vocabulary.stream()) for index in range(request.sampling.n)
        ]
        running = [each for each in samples if not each.had_ended]
        count = len(running)
        live = self._live[request.request_id] = _Live(request, prompt, samples)
        self._idle.clear()
        try:
            async with aclosing(merge_streams([self._sample(core, live, each) for each in running])) as chunks:
                async for chunk in chunks:
                    count -= chunk.finish_reason is not None
                    yield chunk if count else _last(chunk, live)
        except Exception as error:
            self._counters.failed += 1
            raise translated(core, request.request_id, error) from error
        finally:
            self._forget(live)

    async def abort(self, request_id: str) -> bool:
        live, core = self._live.get(request_id), self._core
        if live is None or core is None or core.is_dead:
            return False
        await core.llm.abort([sample_id(request_id, each.index) for each in live.samples])
        await core.llm.is_paused()  # a round trip: its core has freed the blocks
        return True

    async def tokenize(self, text: str, pair: str | None = None, *, special: bool = True) -> list[int]:
        enough = self._running().max_model_len
        return await self._tokenizer.encode_off_loop(text, pair, enough=enough, special=special)

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        self._running()
        return self._tokenizer.pieces(tokens)

    def token_bytes(self, token: int) -> bytes:
        self._running()
        return self._vocabulary.token_bytes(token)

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: PromptOptions = PLAIN_PROMPT,
    ) -> list[int]:
        tokenizer, enough = self._tokenizer, self._running().max_model_len
        return await tokenizer.pool.run(lambda: tokenizer.chat_prompt(messages, tools, options, enough=enough))

    async def stats(self) -> EngineStats:
        core = self._running()
        if core.is_dead:
            raise died("the engine is gone")
        live = sum(each.num_running for each in self._live.values())
        used = core.recorder.kv_usage if live else 0.0  # vLLM sends no figures when the last request is aborted
        running = min(core.recorder.running, live)
        return replace(
            self._counters,
            running=running,
            waiting=live - running,
            free_blocks=round((1.0 - used) * core.num_blocks),
            steps=core.recorder.steps,
            step_ms=core.recorder.step_ms,
            preemptions=core.recorder.preemptions,
            adapters={name: digest for name, (_, digest) in self._loras.items()},
            weights_version=self._weights_version,
        )

    async def pause(self) -> None:
        core = self._offering("pause")
        await core.llm.pause_generation(mode="keep", clear_cache=False)
        self._counters.state = "paused"

    async def resume(self) -> None:
        await self._offering("pause").llm.resume_generation()
        self._counters.state = "serving"

    async def load_weights(self, source: str, version: str | None = None) -> str:
        self._offering("weights_swap")
        assert self._weights is not None
        is_paused = self._counters.state == "paused"
        return await self._weights.swap(source, version, stays_paused=is_paused)

    def can_resume(self, request: GenRequest) -> bool:
        return not lost_on_resume(request.sampling)

    async def load_lora(self, name: str, path: str) -> None:
        core = self._offering("lora")
        if name in self._loras:
            raise ConflictError(f"adapter {name} is loaded already.", hint="Unload it first.")
        if len(self._loras) >= self._config.max_loras:
            raise ConflictError(
                f"{len(self._loras)} adapters are loaded, which is max_loras.", hint="Unload one, or raise max_loras."
            )
        self._loras_loaded += 1  # never used again. vLLM's prefix cache knows adapters by name and path alone
        adapter = core.modules["lora"].LoRARequest(f"{name}#{self._loras_loaded}", self._loras_loaded, path)
        digest = await asyncio.to_thread(adapter_digest, Path(path))
        try:
            await core.llm.add_lora(adapter)
        except Exception as error:
            raise DataError(
                f"vLLM cannot load adapter {name} from {path}: {error}", hint="Check the adapter."
            ) from error
        self._loras[name] = adapter, digest

    async def unload_lora(self, name: str) -> None:
        core = self._offering("lora")
        if name not in self._loras:
            raise NotFoundError(f"adapter {name} is not loaded.", hint="It may have been unloaded.")
        if any(live.request.lora == name for live in self._live.values()):
            raise ConflictError(f"requests use adapter {name}.", hint="Unload it when they have ended.")
        await core.llm.remove_lora(self._loras.pop(name)[0].lora_int_id)

    async def drain(self, timeout_s: float) -> bool:
        self._accepting = False
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            for request_id in list(self._live):
                await self.abort(request_id)
            return False
        return True

    async def shutdown(self) -> None:
        self._accepting = False
        core = self._core
        if core is None:
            return
        for request_id in list(self._live):
            await self.abort(request_id)
        self._core = None
        await asyncio.to_thread(core.shutdown)

    @property
    def _weights_version(self) -> str:
        return "" if self._weights is None else self._weights.version

    def _running(self) -> VllmCore:
        if self._core is None:
            raise EngineError("the engine is not running.", hint="Await start() first.")
        return self._core

    def _offering(self, feature: Feature) -> VllmCore:
        core = self._running()
        if feature not in core.features:
            refuse(self.backend, feature)
        return core

    async def _warm_up(self, core: VllmCore) -> None:
        """Generates one token, because a model that vLLM cannot compute (such as one with an unsupported head size)
        kills its core only at the first request.
        """
        params = core.modules["sampling_params"].SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        try:
            async for _ in core.llm.generate(tokens_prompt(core, [1], ""), params, "warm up"):
                pass
        except Exception as error:
            raise ConfigError(
                f"vLLM loads this model but cannot compute it: {error}",
                hint="Its own log on stderr says why; the native engine may serve it.",
            ) from error

    def _admit(self, request: GenRequest, prompt: list[int]) -> VllmCore:
        core, name = self._core, request.request_id
        if core is None or not self._accepting:
            raise OverloadedError("the engine is draining or stopped.", hint="Retry on another replica.")
        if name in self._live:
            raise ConflictError(f"request {name} is already running.", hint="Give each request its own id.")
        check_features(request, core.features, self.backend)
        check_prompt(f"request {name}", prompt, max_len=core.max_model_len, vocab_size=core.vocab_size)
        params = request.sampling
        check_request(request)
        check_resume(
            request,
            len(prompt),
            max_len=core.max_model_len,
            vocab_size=core.vocab_size,
            stop_token_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_ids),
        )
        if request.lora is not None and request.lora not in self._loras:
            raise NotFoundError(f"adapter {request.lora} is not loaded.", hint="Load it first.")
        if (
            sum(len(live.samples) for live in self._live.values())
            >= self._config.max_running + self._config.max_waiting
        ):
            raise OverloadedError(f"{self._config.max_waiting} requests are waiting already.", hint="Retry later.")
        return core

    async def _sample(self, core: VllmCore, live: _Live, sample: SampleOutput) -> AsyncGenerator[GenChunk, None]:
        request = live.request
        lora = self._loras[request.lora][0] if request.lora else None
        arguments = call(core, request, live.prompt, sample.index, self._end_ids, lora)
        async with aclosing(core.llm.generate(**arguments)) as outputs:  # closed early, it ends in vLLM too
            async for output in outputs:
                before = sample.num_tokens
                chunk = sample.take(output)
                self._counters.generated_tokens += sample.num_tokens - before
                yield chunk
                if chunk.finish_reason:  # perhaps by a stop string, which vLLM does not see
                    return

    def _forget(self, live: _Live) -> None:
        del self._live[live.request.request_id]
        if not self._live:
            self._idle.set()
        self._counters.finished += 1
        self._counters.prompt_tokens += len(live.prompt)
        self._counters.cached_tokens += live.first.num_cached


def _last(chunk: GenChunk, live: _Live) -> GenChunk:
    """Returns the request's last chunk with the usage of all samples. Its cached tokens and times are those of the
    first sample that ran here.
    """
    count = sum(each.num_tokens for each in live.samples)
    usage = TokenUsage(len(live.prompt), count, live.first.num_cached)
    return replace(chunk, usage=usage, timing=live.first.timing or Timing(0.0, 0.0, 0.0))


T = TypeVar("T")


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields the items of all streams in order of arrival. Ends when all streams have ended, or with the first error.
    Closing this generator closes the streams.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    arrived: asyncio.Queue[T | _End] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, arrived)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            came = await arrived.get()
            if not isinstance(came, _End):
                yield came
            elif came.error is not None:
                raise came.error
            else:
                open_streams -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def _pump(stream: AsyncGenerator[T, None], arrived: asyncio.Queue[T | _End]) -> None:
    error: Exception | None = None
    try:
        async with aclosing(stream):
            async for item in stream:
                arrived.put_nowait(item)
    except BaseException as caught:
        error = as_request_error(caught)
    arrived.put_nowait(_End(error))
