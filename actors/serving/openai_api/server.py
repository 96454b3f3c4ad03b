"""The state behind the HTTP routes: the engine, the model's name, and the translation of request bodies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal
from uuid import uuid4

from raytide.actors.engine.base import Engine
from raytide.actors.engine.limits import MAX_CHOICES, MAX_LOGPROB_ENTRIES
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.text.worker_pool import TextPool
from raytide.actors.engine.types import PLAIN_PROMPT, EngineInfo, Feature, GenRequest, Message, PromptOptions
from raytide.actors.serving.health import ProgressWatch
from raytide.actors.serving.metrics import ServingMetrics
from raytide.actors.serving.openai_api.admission import Anybody, RequestCaller
from raytide.actors.serving.openai_api.answers.bodies import Model
from raytide.actors.serving.openai_api.chat.image_fetcher import ImageFetcher
from raytide.actors.serving.openai_api.chat.images import images_of
from raytide.actors.serving.openai_api.chat.tool_choice import NO_TOOLS, ToolUse, tool_use_of
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.fields.truncation import Truncation
from raytide.actors.serving.openai_api.generation import GenerationStream
from raytide.actors.serving.openai_api.params import messages_of, refuse_missing, sampling_of
from raytide.actors.serving.openai_api.wire import ChatRequest, CompletionRequest

_TAIL_TOKENS = 16
"""The number of tokens at a prompt's end that are searched for an opening reasoning tag, which has fewer."""
_OPENING, _CLOSING = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a chat: its tokens, the files of its images, and the use of its tools."""

    tokens: list[int]
    images: tuple[bytes, ...]
    use: ToolUse


class Server:
    """The state of one model's HTTP routes. `min_priority` limits callers without a key: it is the lowest, most urgent
    priority that their requests may have.
    """

    def __init__(self, engine: Engine, *, model: str, drain_s: float = 30.0, min_priority: int = 0) -> None:
        self.engine = engine
        self.model = model
        self.metrics = ServingMetrics(model)
        self._watch = ProgressWatch()
        self.texts = TextPool()
        self._drain_s, self.min_priority = drain_s, min_priority
        self._created = int(time.time())
        self._info: EngineInfo | None = None
        self.version = ""
        """The version of the model as usage names it; the engine's version of the weights if it is empty."""
        self.lora: str | None = None
        self.images = ImageFetcher(())

    async def start(self) -> None:
        self._info = await self.engine.start()

    async def stop(self) -> None:
        """Lets running requests end, for at most `drain_s`, then frees the engine."""
        await self.engine.drain(self._drain_s)
        await self.engine.shutdown()

    def with_adapter(self, model: str, lora: str) -> Server:
        """Returns a server that uses the same engine, is named `model`, and answers with the LoRA adapter `lora`."""
        adapted = copy(self)
        adapted.model, adapted.lora = model, lora
        return adapted

    def describe(self, info: EngineInfo) -> None:
        """Sets the engine's description. The gateway calls this with each description that an endpoint's replicas
        send.
        """
        self._info = info

    @property
    def is_described(self) -> bool:
        return self._info is not None

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "Server.start() comes first"
        return self._info

    async def problem(self) -> str | None:
        """Returns the reason why this replica is unhealthy, or None."""
        try:
            stats = await self.engine.stats()
        except Exception as error:
            return f"the engine does not answer: {error}"
        return self._watch.problem(stats, time.monotonic())

    def card(self, name: str) -> Model:
        self.check_name(name)
        length = None if self._info is None else self._info.max_model_len
        return Model(id=self.model, created=self._created, max_model_len=length)

    def check_name(self, name: str) -> None:
        """Raises ApiError (404) unless `name` is this model's name."""
        if name != self.model:
            raise invalid(
                f"The model {name!r} does not exist here; this endpoint serves {self.model!r}.",
                param="model",
                code="model_not_found",
                status=404,
            )

    def require(self, feature: Feature, *, param: str) -> None:
        """Raises ApiError if the engine lacks the feature. The error names the field `param`."""
        if feature not in self.info.features:
            raise invalid(f"{feature} is not supported by {self.model}.", param=param)

    async def generate(
        self, request: CompletionRequest | ChatRequest, caller: RequestCaller | None = None, session: str = ""
    ) -> GenerationStream:
        """Validates the whole request, asks `caller` to admit the request, and then starts the generation."""
        caller = caller or Anybody()
        self.check_name(request.model)
        if self.info.num_labels:
            raise invalid(f"{self.model} classifies: it generates no text.", param="model")
        use = tool_use_of(request, self.info.chat) if isinstance(request, ChatRequest) else NO_TOOLS
        sampling, echoes, images = sampling_of(request, use.structured), [""], tuple[bytes, ...]()
        cut = Truncation.of(request, self.info.max_model_len, answer=sampling.max_tokens or 1, side="left")
        if isinstance(request, ChatRequest):
            chat = await self.chat_prompt(request, use)
            prompts, images, use = [self._cut_chat(chat, cut)], chat.images, chat.use
        else:
            special = request.add_special_tokens is not False
            prompts = await self.prompts(request.prompt, field="prompt", special=special, cut=cut)
            given = prompts if cut is not None else request.prompt
            echoes = await self._echoes(given, prompts) if request.echo else [""] * len(prompts)
        _check_size(sampling, prompts)
        group = uuid4().hex
        asked = [
            GenRequest(
                request_id=f"{group}-{place}",
                prompt=prompt,
                sampling=sampling,
                priority=self._priority(request.priority, caller),
                lora=self.lora,
                cache_salt=_salt(request.cache_salt, caller),
                session=session,
                keep_answer=caller.keeps_answers,
                team=caller.team,
                weight=caller.weight,
                images=images,
                rejoin_key="" if caller.row is None else f"{caller.row.id}-{place}",
                may_be_running=caller.row is not None and caller.row.may_be_running,
            )
            for place, prompt in enumerate(prompts)
        ]
        refuse_missing(request, asked[0], self.info.features)
        if request.priority:
            self.require("priority", param="priority")
        grant = await caller.admit(self.model, sum(map(len, prompts)), self._most_tokens(sampling, prompts))
        return GenerationStream(self.engine, asked, echoes, use, grant)

    async def chat_prompt(self, request: ChatRequest, use: ToolUse | None = None) -> ChatPrompt:
        """Returns the prompt of a chat. `use` says how the chat uses tools. If `use` is not given, it is derived from
        the request.

        The length of the prompt is not checked here. The engine shortens a very long prompt, but the result may
        still be longer than the context.
        """
        use = use or tool_use_of(request, self.info.chat)
        messages = messages_of(request.messages, sees_images="images" in self.info.features)
        images = await images_of(request.messages, self.images)
        options = prompt_options(request)
        tokens = await self.engine.chat_prompt(messages, use.shown, options)
        if use.reasoning and options != PLAIN_PROMPT:
            use = replace(use, reasoning=await reasoning_after(self.engine, tokens, messages[-1], options))
        return ChatPrompt(tokens, images, use)

    async def prompts(
        self,
        given: str | list[str] | list[int] | list[list[int]],
        *,
        field: str,
        special: bool = True,
        cut: Truncation | None = None,
    ) -> list[list[int]]:
        """Returns prompts as token lists. `given` is in any of OpenAI's four forms. If `cut` is given, prompts that are
        too long are truncated according to `cut`. Raises ApiError for a prompt that is empty or exceeds the context.
        """
        items: Sequence[str | int | list[int]] = [given] if isinstance(given, str) else given
        tokens = [item for item in items if isinstance(item, int)]
        texts = [item for item in items if not isinstance(item, int)]
        if not (tokens or texts):
            raise invalid(f"{field} is empty.", param=field)
        prompts = [tokens] if tokens else []
        for text in texts:
            if isinstance(text, str):
                prompts.append(await self.tokens(text, field=field, special=special, cut=cut))
            else:
                prompts.append(text)
        if cut is not None:
            prompts = [cut.cut(prompt) for prompt in prompts]
        for prompt in prompts:
            self._check_length(prompt, field)
        return prompts

    async def tokens(
        self, text: str, pair: str | None = None, *, field: str, special: bool = True, cut: Truncation | None = None
    ) -> list[int]:
        """Returns the token ids of a text, or of a pair of texts that the model reads together. Raises ApiError if the
        text has no tokens, or more tokens than the context.
        """
        tokenize = partial(self.engine.tokenize, special=special)
        if cut is None:
            tokens = await tokenize(text, pair)
        elif pair is None:
            tokens = await cut.text(text, tokenize)
        else:
            tokens = cut.pair(await tokenize(text, pair), await tokenize(text, ""), await tokenize("", ""))
        self._check_length(tokens, field)
        await asyncio.sleep(0)  # many short ones together must not block the event loop
        return tokens

    def _cut_chat(self, chat: ChatPrompt, cut: Truncation | None) -> list[int]:
        """Returns the tokens of a chat's prompt, cut by `cut`. Raises ApiError if they do not fit into the context: of
        a prompt that is longer, the engine tokenizes only the beginning, so it cannot be cut on the left.
        """
        tokens = chat.tokens
        if cut is not None and len(tokens) > cut.length:
            if chat.images:
                raise invalid("truncate_prompt_tokens: a chat with images is not cut.", param="truncate_prompt_tokens")
            if cut.side == "right" or len(tokens) <= cut.limit:
                tokens = cut.cut(tokens)
        self._check_length(tokens, "messages")
        return tokens

    def _priority(self, asked: int | None, caller: RequestCaller) -> int:
        """Returns the request's priority. It is at most as urgent as the caller or the endpoint allows."""
        most_urgent = caller.priority if caller.is_known else self.min_priority
        return max(most_urgent, caller.priority if asked is None else asked)

    def _most_tokens(self, sampling: SamplingParams, prompts: list[list[int]]) -> int:
        """Returns the maximum number of tokens that all choices together can have."""
        room = [self.info.max_model_len - len(prompt) for prompt in prompts]
        return sampling.num_samples * sum(min(each, sampling.max_tokens or each) for each in room)

    async def _echoes(self, given: str | Sequence[object], prompts: list[list[int]]) -> list[str]:
        """Returns the prompts as texts: the given texts, or decoded tokens."""
        texts = [given] if isinstance(given, str) else [item for item in given if isinstance(item, str)]
        return texts or await self.engine.decode(prompts)

    def _check_length(self, prompt: list[int], field: str) -> None:
        if not prompt:
            raise invalid(f"{field} is empty.", param=field)
        self.check_fits(prompt, field, answer=1)

    def check_fits(self, prompt: Sequence[int], field: str, *, answer: int = 0) -> None:
        """Raises ApiError if the length of the prompt plus `answer` exceeds the context. The error states only a lower
        bound of the prompt's length, because engines cut very long texts before they tokenize them.
        """
        limit = self.info.max_model_len
        if len(prompt) + answer > limit:
            raise invalid(
                # in OpenAI's words, by which clients recognize the error
                f"This model's maximum context length is {limit} tokens, the answer included; {field} has at least "
                f"{len(prompt)}.",
                param=field,
                code="context_length_exceeded",
            )


def _salt(asked: str | None, caller: RequestCaller) -> str:
    """Returns the salt of the prefix cache. It differs between any two teams, and between a team and unknown callers,
    whatever salts they ask for: a shared prefix would tell one team what another one sent.
    """
    if caller.is_known:
        return f"{len(caller.team)}:{caller.team}{asked or ''}"
    return f":{asked}" if asked else ""


def _check_size(sampling: SamplingParams, prompts: list[list[int]]) -> None:
    """Refuses requests whose parts are each within their limits but too large together."""
    choices = len(prompts) * sampling.num_samples
    if choices > MAX_CHOICES:
        raise invalid(
            f"{len(prompts)} prompts times {sampling.num_samples} samples are {choices} choices; at most {MAX_CHOICES} "
            "are computed for one request.",
            param="n",
        )
    if sampling.prompt_logprobs is not None:
        entries = sum(map(len, prompts)) * (1 + sampling.prompt_logprobs)
        if entries > MAX_LOGPROB_ENTRIES:
            raise invalid(
                f"echo with logprobs asks for {entries} log probabilities of prompts; at most {MAX_LOGPROB_ENTRIES} "
                "are computed for one request.",
                param="logprobs",
            )


def prompt_options(request: ChatRequest) -> PromptOptions:
    """Returns the options of a chat's prompt. Raises ApiError (400) if two fields exclude each other. vLLM refuses the
    same fields.
    """
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
            )
        return PromptOptions(kwargs, "open")
    return PromptOptions(kwargs, "closed" if request.add_generation_prompt is False else "answer")


async def reasoning_after(
    engine: Engine, prompt: Sequence[int], last: Message, options: PromptOptions
) -> Literal["", "tagged", "open"]:
    """Returns the format of the reasoning in the answer to this prompt: `open` if the answer begins inside the
    reasoning, `tagged` if it may begin with reasoning in tags, or an empty string if no reasoning is expected.

    Use it for prompts with options. The format that the engine states is valid only for prompts without options.
    With options, a template may open or close the reasoning itself, and a continued message may have begun inside
    the reasoning.
    """
    if options.ending == "open":
        return "open" if last.content.count(_OPENING) > last.content.count(_CLOSING) else ""
    (tail,) = await engine.decode([prompt[-_TAIL_TOKENS:]])
    return "open" if tail.rstrip().endswith(_OPENING) else "tagged"
