"""Translates request bodies into messages and sampling parameters. An unsupported field that would change the answer
raises an error. It is never dropped silently.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import BaseModel

from raytide.actors.engine.base import required_features
from raytide.actors.engine.sampling_params import SamplingParams, Structured
from raytide.actors.engine.types import Feature, GenRequest, Message, ToolCallTurn
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.fields.structure import constraint_field, structured_of
from raytide.actors.serving.openai_api.wire import (
    NO_EFFECT,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for plain completions; a chat continues until the model stops or the context is full."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "request_id": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Known fields of OpenAI and vLLM that this server does not implement, with their neutral values."""

_FIELD_OF: dict[Feature, str] = {"stop_strings": "stop"}
"""The request field of each feature whose field has another name than the feature."""
_LEAST_TOP_P = 1e-9
"""The value that replaces a top_p of 0, which OpenAI accepts: only the most likely token remains."""
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def sampling_of(request: GenerationRequest, forced: Structured | None = None) -> SamplingParams:
    """Returns the sampling parameters of a request. `forced` is the constraint that the request's tools put on the
    output.
    """
    refuse_unknown(request)
    defaults = SamplingParams()
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if not all(stop):
        raise invalid("stop: a stop sequence cannot be empty.", param="stop")
    n = request.n or 1
    if request.best_of is not None and request.best_of < n:
        raise invalid(f"best_of ({request.best_of}) must be at least n ({n}).", param="best_of")
    if request.stream and (request.best_of or n) > n:
        raise invalid("best_of chooses at the end: it cannot be streamed.", param="best_of")
    max_tokens = _max_tokens(request)
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        raise invalid(f"min_tokens is more than max_tokens ({max_tokens}).", param="min_tokens")
    logprobs = _logprobs(request)
    echoed = isinstance(request, CompletionRequest) and request.echo and logprobs is not None
    if echoed and n > 1:
        raise invalid("echo with logprobs goes with n = 1 only.", param="echo")
    _check_prompt_logprobs(request, n, echoed=bool(echoed))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else max(_LEAST_TOP_P, request.top_p),
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        seed=request.seed,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        bad_words=tuple(request.bad_words or ()),
        logit_bias=request.logit_bias or {},
        repetition_penalty=request.repetition_penalty or defaults.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        n=n,
        best_of=request.best_of,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echoed else request.prompt_logprobs,
        structured=_constraint(request, forced),
    )


def _check_prompt_logprobs(request: GenerationRequest, n: int, *, echoed: bool) -> None:
    if request.prompt_logprobs is None:
        return
    for holds, other in ((n > 1, "n above 1"), (request.stream, "stream"), (echoed, "echo and logprobs")):
        if holds:
            raise invalid(f"prompt_logprobs and {other} exclude each other.", param="prompt_logprobs")


def _constraint(request: GenerationRequest, forced: Structured | None) -> Structured | None:
    """Returns the constraint of the output. `forced` is that of a required call, or of calls beside a response format:
    as at OpenAI, a format is one of text, so calls need not have it.
    """
    asked = structured_of(request)
    if forced is None:
        return asked
    if asked is not None and (field := constraint_field(request)) != "response_format":
        raise invalid(f"tools that the model may call and {field} exclude each other.", param="tool_choice")
    return forced


def refuse_missing(body: GenerationRequest, request: GenRequest, features: Collection[Feature]) -> None:
    """Raises ApiError (400) if the request needs a feature that the engine lacks. The error names the responsible field
    of `body`.
    """
    for feature in required_features(request):
        if feature not in features:
            field = _field_of(feature, body, request.sampling)
            raise invalid(f"{field} is not supported by this model server.", param=field)


def _field_of(feature: Feature, body: GenerationRequest, sampling: SamplingParams) -> str:
    if feature == "structured":
        return constraint_field(body) or "tool_choice"
    if feature == "penalties":
        neutral = SamplingParams()
        return next(name for name in _PENALTIES if getattr(sampling, name) != getattr(neutral, name))
    if feature == "prompt_logprobs" and body.prompt_logprobs is None:
        return "echo"
    return _FIELD_OF.get(feature, feature)


def _logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if not request.logprobs and request.top_logprobs:
        raise invalid("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _max_tokens(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatRequest):
        return request.max_completion_tokens or request.max_tokens
    return request.max_tokens or COMPLETION_MAX_TOKENS


def refuse_unknown(request: BaseModel) -> None:
    """Raises ApiError (400) for a field that the request's class does not have. Fields whose value would not change the
    answer are allowed.
    """
    for name, value in (request.model_extra or {}).items():
        if value is None or name in NO_EFFECT:
            continue
        if name not in _NEUTRAL:
            raise invalid(f"Unrecognized request argument: {name}.", param=name)
        if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[name]):
            raise invalid(f"{name} is not supported by this model server.", param=name)


def messages_of(messages: Sequence[ChatMessage], *, sees_images: bool = False) -> list[Message]:
    """Returns the messages for the engine. The text parts of a message are joined.

    Raises ApiError for a part of another type, and names the part. Images are allowed only if the model `sees_images`.
    The role "developer" becomes "system": "developer" is OpenAI's newer name for that role.
    """
    return [
        Message(
            "system" if message.role == "developer" else message.role,
            _text(message, index, sees_images=sees_images),
            tool_calls=tuple(
                ToolCallTurn(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
            ),
            tool_call_id=message.tool_call_id or "",
            name=message.name or "",
            parts=_parts(message),
        )
        for index, message in enumerate(messages)
    ]


def _text(message: ChatMessage, index: int, *, sees_images: bool) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise invalid(f"messages[{index}].content is missing.", param=f"messages[{index}].content")
        return ""
    if isinstance(message.content, str):
        return message.content
    for place, part in enumerate(message.content):
        where = f"messages[{index}].content[{place}]"
        if part.type == "image_url" and sees_images:
            if message.role != "user" or part.image_url is None:
                raise invalid(f"{where}: an image is a user's, and has an image_url.", param=where)
        elif part.type != "text" or part.text is None:
            kinds = "text and image_url" if sees_images else "text"
            raise invalid(f"{where}: this model reads {kinds} parts only, not {part.type!r}.", param=where)
    return "".join(part.text or "" for part in message.content)


def _parts(message: ChatMessage) -> tuple[str | None, ...]:
    """Returns a message's parts in order: texts, and None for each image. Empty for a message without images."""
    if not isinstance(message.content, list) or all(part.type == "text" for part in message.content):
        return ()
    return tuple(None if part.type == "image_url" else part.text for part in message.content)
