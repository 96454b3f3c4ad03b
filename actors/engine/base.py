"""The `Engine` protocol, through which replicas, the router and tests use an engine.

Implementations are `native.NativeEngine`, `vllm.VllmEngine`, `fake.FakeEngine` and `remote.RemoteEngine`, which is a
client of an engine in another process. All of them must pass the conformance suite in tests/actors/engine/conformance.
`EngineInfo.features` lists the optional features of an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, Protocol

from raytide.actors.engine.kv_cache.handle import KvHandle
from raytide.actors.engine.types import (
    PLAIN_PROMPT,
    EngineInfo,
    EngineStats,
    Feature,
    GenChunk,
    GenRequest,
    Message,
    PromptOptions,
    SampleProgress,
    Timing,
    TokenUsage,
    check_progress,
)
from raytide.core.errors import UsageError

Prompt = str | Sequence[int]


class Engine(Protocol):
    """One model that serves many requests at once, from one asyncio event loop.

    Methods that belong to a feature are optional. An engine without the feature neither declares it nor overrides
    its methods. These methods then raise UsageError when they are called.
    """

    backend: str = "this"

    async def start(self) -> EngineInfo:
        """Loads the model, starts to serve and returns the engine's description. Raises ConfigError or DataError when
        the model directory is unusable.
        """

    def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        """Streams all samples of one request. The last chunk carries `usage`. Closing the iterator aborts the request.

        If the request has `resume` (feature "resume"), only the rest of the output is streamed, but `usage` counts
        the whole output. Before the first chunk, the iterator may raise UsageError (a bad prompt, or a feature that
        the engine lacks), NotFoundError (adapter not loaded), ConflictError (request id in use) or OverloadedError
        (queue full or draining). It raises EngineError if this request fails.
        """

    async def abort(self, request_id: str) -> bool:
        """Ends all samples of a request now, with finish reason "abort". The request's KV blocks are free when this
        returns. Returns False for an unknown request.
        """

    async def tokenize(self, text: str, pair: str | None = None, *, special: bool = True) -> list[int]:
        """Returns the token ids of a text. With `pair`, returns the token ids of two texts, joined as the model's
        tokenizer joins a pair.

        If `special` is true, the tokenizer adds its special tokens, such as a BOS.
        """

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Returns the texts of prompts that are given as token ids. Special tokens appear by name."""
        bytes_of = self.token_bytes
        return await asyncio.to_thread(
            lambda: [b"".join(map(bytes_of, prompt)).decode(errors="replace") for prompt in prompts]
        )

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Returns the name that each of the tokens has in the tokenizer's vocabulary. The name of an unknown token is
        "".
        """

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes that a token adds in the middle of a text. The bytes are UTF-8, but may begin or end inside
        a character.
        """
        refuse(self.backend, "logprobs")

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: PromptOptions = PLAIN_PROMPT,
    ) -> list[int]:
        """Returns the token ids of a conversation, rendered with the model's chat template and ready for `generate`.
        `tools` are the tools that the model may call, in OpenAI's form.
        """

    async def stats(self) -> EngineStats: ...

    async def cached_prefix(self, token_ids: Sequence[int], *, lora: str | None = None, cache_salt: str = "") -> int:
        """Returns the length of the longest prefix of the prompt, in tokens, whose KV is in the prefix cache now. A
        prefix in memory counts. A prefix on disk counts only if reading it is faster than computing it. Returns 0 if
        the length is unknown.
        """
        return 0

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for running ones. Aborts those that do not end in time. Returns whether all
        ended in time.
        """

    async def shutdown(self) -> None:
        """Aborts running requests, stops, and frees the memory. Idempotent."""

    def tap(self, take: Callable[[list[Any]], list[Any]]) -> None:
        """Sets a filter for the engine's outputs. The engine's own thread calls `take` with the chunks of each step,
        and delivers only the chunks that `take` returns.

        `take` must return the last chunk of each request. An engine without a thread of its own never calls `take`.
        """
        return

    def can_resume(self, request: GenRequest) -> bool:
        """Returns whether this request can continue from tokens that were already generated. The result applies only to
        engines with the feature "resume".
        """
        return True

    async def pause(self) -> None:
        """Feature "pause". Stops the computation of steps until `resume` is called. Running requests stay in the
        engine, and new requests are queued. `pause` and `resume` are idempotent.
        """
        refuse(self.backend, "pause")

    async def resume(self) -> None:
        refuse(self.backend, "pause")

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Feature "sleep". Pauses and frees memory. Level 1 frees the KV cache, level 2 frees the weights as well.
        Requests stay, and their KV is computed again after `wake`.
        """
        refuse(self.backend, "sleep")

    async def wake(self) -> None:
        """Allocates the memory that `sleep` freed, and resumes. Does nothing if the engine is not asleep. Raises
        ConflictError if the weights on disk have changed since they were loaded. In that case, call `load_weights`.
        """
        refuse(self.backend, "sleep")

    async def load_weights(self, source: str, version: str | None = None) -> str:
        """Feature "weights_swap". Serves the weights of another directory of the same architecture from the next step
        on. Running requests continue with the new weights. Returns the version of the new weights, by default a hash of
        their content. A load that fails changes nothing.
        """
        refuse(self.backend, "weights_swap")

    async def load_lora(self, name: str, path: str) -> None:
        """Feature "lora". Loads an adapter, which requests then use under `name`. Raises ConflictError if the name is
        in use, and DataError if the adapter is invalid.
        """
        refuse(self.backend, "lora")

    async def unload_lora(self, name: str) -> None:
        """Removes an adapter. Raises NotFoundError for an unknown name. Raises ConflictError while requests use the
        adapter.
        """
        refuse(self.backend, "lora")

    async def embed(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
        """Feature "embeddings". Returns one vector for each text or list of token ids. Each vector is scaled to the
        Euclidean norm 1. Raises NotFoundError for an adapter that is not loaded.
        """
        refuse(self.backend, "embeddings")

    async def classify(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
        """Feature "classification". Returns the logits of the model's labels for each text or list of token ids."""
        refuse(self.backend, "classification")

    async def export_kv(self, request_id: str) -> KvHandle:
        """Feature "kv_transfer". Removes a request from this engine between two steps, and returns everything that
        another engine needs to continue it. The request must have only one sample. The request's stream in this engine
        ends with finish reason "abort". Raises NotFoundError for an unknown request.
        """
        refuse(self.backend, "kv_transfer")

    def import_kv(self, handle: KvHandle, request: GenRequest) -> AsyncIterator[GenChunk]:
        """Continues a request that another engine exported. Streams the output from the point where the other engine's
        stream ended. `request` is the exported request; its id may be new. Raises ConflictError if the handle is from
        another model, version or layout.
        """
        refuse(self.backend, "kv_transfer")


def refuse(backend: str, feature: Feature) -> NoReturn:
    """Raises a UsageError, which says that the engine does not have this feature."""
    hint = "It needs the package llguidance. " if feature == "structured" else ""
    raise UsageError(
        f"the {backend} engine does not support {feature}.",
        hint=f"{hint}EngineInfo.features lists what an engine supports.",
    )


def check_features(request: GenRequest, features: Collection[Feature], backend: str) -> None:
    """Raises UsageError when a request needs a feature that the engine does not declare."""
    for feature in required_features(request):
        if feature not in features:
            refuse(backend, feature)


def check_prompt(who: str, prompt: Sequence[int], *, max_len: int, vocab_size: int) -> None:
    """Raises UsageError for a prompt that is empty, leaves no room for an answer, or has unknown tokens."""
    if not 0 < len(prompt) < max_len:
        raise UsageError(
            f"{who}: prompt of {len(prompt)} tokens; the engine takes 1 to {max_len - 1}.",
            hint="Send a shorter prompt, but not an empty one.",
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise UsageError(
            f"{who}: a token id is outside 0 to {vocab_size - 1}.", hint="Use the tokenizer of this model."
        )


def check_resume(
    request: GenRequest, prompt_len: int, *, max_len: int, vocab_size: int, stop_token_ids: frozenset[int]
) -> None:
    """Raises UsageError if a resumed request contains unknown tokens. Also raises UsageError if the output of a sample
    is already complete and the sample has no finish reason. An output is complete if it has reached the maximum length
    or contains a stop token.
    """
    for index, each in enumerate(request.resume):
        tokens = each.token_ids
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise UsageError(
                f"request {request.request_id} cannot be resumed: a token id is outside 0 to {vocab_size - 1}.",
                hint="Resume it on an engine with the same model.",
            )
        is_over = prompt_len + len(tokens) >= max_len or not stop_token_ids.isdisjoint(tokens)
        check_progress(request, index, is_over=is_over)


class StreamProgress:
    """The tokens and finish reasons of a request's stream so far. With them, another engine can continue the stream."""

    def __init__(self, request: GenRequest) -> None:
        self._request = request
        missing = request.sampling.n - len(request.resume)
        samples = [*request.resume, *[SampleProgress()] * missing]
        self._token_ids = [list(each.token_ids) for each in samples]
        self._finish_reasons = [each.finish_reason for each in samples]

    def add(self, chunk: GenChunk) -> None:
        """Adds a received chunk of the stream to the progress."""
        self._token_ids[chunk.index] += chunk.token_ids
        self._finish_reasons[chunk.index] = chunk.finish_reason or self._finish_reasons[chunk.index]

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the prompt, followed by those of the first sample. Empty if the prompt is a text."""
        return [] if isinstance(self._request.prompt, str) else [*self._request.prompt, *self._token_ids[0]]

    def resumed(self) -> GenRequest:
        """Returns the request for the rest of the stream. Before the first token, this is the original request."""
        if not any(self._token_ids):
            return self._request
        pairs = zip(self._token_ids, self._finish_reasons, strict=True)
        return replace(self._request, resume=tuple(SampleProgress(tuple(ids), reason) for ids, reason in pairs))


def aborted_chunks(request: GenRequest, prompt_len: int) -> list[GenChunk]:
    """Returns the last chunks of a request that was aborted before the engine started it."""
    ended = {index for index, each in enumerate(request.resume) if each.finish_reason is not None}
    running = [index for index in range(request.sampling.n) if index not in ended]
    chunks = [GenChunk(request.request_id, [], "", "abort", index=index) for index in running]
    usage = TokenUsage(prompt_len, sum(len(each.token_ids) for each in request.resume))
    chunks[-1] = replace(chunks[-1], usage=usage, timing=Timing(0.0, 0.0, 0.0))
    return chunks


def required_features(request: GenRequest) -> list[Feature]:
    """Returns the optional features that a request needs."""
    params = request.sampling
    asked: dict[Feature, bool] = {
        "bad_words": bool(params.bad_words),
        "images": bool(request.images),
        "best_of": params.num_samples > params.n,
        "logit_bias": bool(params.logit_bias),
        "logprobs": params.logprobs is not None,
        "lora": request.lora is not None,
        "min_tokens": params.min_tokens > 0,
        "n": params.num_samples > 1,
        "penalties": params.has_penalties,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "resume": bool(request.resume),
        "stop_strings": bool(params.stop),
        "structured": params.structured is not None,
    }
    return [feature for feature, wanted in asked.items() if wanted]
