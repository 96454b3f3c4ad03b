"""From a request body to the engine's sampling parameters. What cannot be honoured is refused, never dropped."""

from __future__ import annotations

from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.serving.errors import invalid
from raytide.actors.serving.wire import ChatRequest, GenerationRequest

__all__ = ["sampling_of"]

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for plain completions; a chat goes on until the model stops or the context is full."""

_NO_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Known fields that ask nothing of the text that comes back."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}
"""Known fields that this server does not implement, with the values that ask for nothing."""


def sampling_of(request: GenerationRequest, choice: int = 0) -> SamplingParams:
    """Of one of the request's `n` choices: with a seed, each choice gets a seed of its own."""
    _refuse_unsupported(request)
    defaults = SamplingParams()
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if not all(stop):
        raise invalid("stop: a stop sequence cannot be empty.", param="stop")
    return SamplingParams(
        max_tokens=_max_tokens(request),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        seed=None if request.seed is None else _wrap_int64(request.seed + choice),
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        repetition_penalty=request.repetition_penalty or defaults.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
    )


def _max_tokens(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatRequest):
        return request.max_completion_tokens or request.max_tokens
    return request.max_tokens or COMPLETION_MAX_TOKENS


def _refuse_unsupported(request: GenerationRequest) -> None:
    for name, value in (request.model_extra or {}).items():
        if value is None or name in _NO_EFFECT:
            continue
        if name not in _NEUTRAL:
            raise invalid(f"Unrecognized request argument: {name}.", param=name)
        if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[name]):
            raise invalid(f"{name} is not supported by this model server.", param=name)


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
