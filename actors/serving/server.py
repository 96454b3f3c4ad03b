"""What the HTTP routes share: one engine, the name of its model, and the way from a request body to an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import uuid4

from raytide.actors.engine.base import Engine
from raytide.actors.engine.core import EngineInfo, GenRequest
from raytide.actors.serving.chat import messages_of
from raytide.actors.serving.errors import invalid
from raytide.actors.serving.generation import Generation
from raytide.actors.serving.health import ProgressWatch
from raytide.actors.serving.metrics import ServingMetrics
from raytide.actors.serving.params import sampling_of
from raytide.actors.serving.wire import ChatRequest, CompletionRequest, GenerationRequest, Model

__all__ = ["Server"]


class Server:
    """`replica` names this process in the `x-raytide-replica` header."""

    def __init__(
        self, engine: Engine, *, model: str, replica: str = "local", stall_limit_s: float = 60.0, drain_s: float = 30.0
    ) -> None:
        self.engine = engine
        self.model = model
        self.replica = replica
        self.metrics = ServingMetrics(model)
        self._watch = ProgressWatch(stall_limit_s)
        self._drain_s = drain_s
        self._created = int(time.time())
        self._info: EngineInfo | None = None

    async def start(self) -> None:
        self._info = await self.engine.start()

    async def stop(self) -> None:
        """Let what runs end, at most `drain_s`, then free the engine."""
        await self.engine.drain(self._drain_s)
        await self.engine.shutdown()

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "Server.start() comes first"
        return self._info

    async def problem(self) -> str | None:
        """Why this replica is not healthy, or None."""
        return self._watch.problem(await self.engine.stats(), time.monotonic())

    def card(self, name: str) -> Model:
        if name != self.model:
            raise invalid(
                f"The model {name!r} does not exist here; this endpoint serves {self.model!r}.",
                param="model",
                code="model_not_found",
                status=404,
            )
        return Model(id=self.model, created=self._created, max_model_len=self.info.max_model_len)

    async def generate(self, request: CompletionRequest | ChatRequest) -> Generation:
        """Everything that can be wrong with the request is found here, before the engine sees any of it."""
        self.card(request.model)
        if isinstance(request, ChatRequest):
            prompts = [await self.engine.chat_prompt(messages_of(request.messages))]
            field = "messages"
        else:
            prompts = [await self._tokens(prompt) for prompt in _prompts(request)]
            field = "prompt"
        for prompt in prompts:
            self._check_length(len(prompt), field)
        return Generation(self.engine, _requests(request, prompts))

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        return await self.engine.tokenize(prompt) if isinstance(prompt, str) else prompt

    def _check_length(self, tokens: int, field: str) -> None:
        limit = self.info.max_model_len
        if tokens == 0:
            raise invalid(f"{field} is empty.", param=field)
        if tokens >= limit:
            raise invalid(
                f"{field} has {tokens} tokens; the context of {self.model} holds {limit}, the answer included.",
                param=field,
                code="context_length_exceeded",
            )


def _prompts(request: CompletionRequest) -> Sequence[str | list[int]]:
    """OpenAI's four forms of `prompt` as a list of texts or token lists."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    tokens = [item for item in prompt if isinstance(item, int)]
    return [tokens] if tokens else [item for item in prompt if not isinstance(item, int)]


def _requests(request: GenerationRequest, prompts: Sequence[list[int]]) -> list[GenRequest]:
    """Choice i of prompt p is number p * n + i, as OpenAI counts them."""
    group = uuid4().hex
    samplings = [sampling_of(request, choice) for choice in range(request.n or 1)]
    return [
        GenRequest(request_id=f"{group}-{place}-{choice}", prompt=prompt, sampling=sampling)
        for place, prompt in enumerate(prompts)
        for choice, sampling in enumerate(samplings)
    ]
