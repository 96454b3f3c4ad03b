"""Translates requests and sampling parameters from raytide's form to vLLM's. Translates log probabilities and errors
from vLLM's form to raytide's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from raytide.actors.engine.backends.vllm.depth import check_depth
from raytide.actors.engine.backends.vllm.launch import VllmCore
from raytide.actors.engine.sampling_params import SamplingParams, Structured
from raytide.actors.engine.text.json_schemas import readable, readable_grammar
from raytide.actors.engine.text.optional_parts import check_optional_parts
from raytide.actors.engine.types import GenRequest, TokenLogprobs
from raytide.core.errors import EngineDeadError, EngineError, RaytideError, UsageError


def sample_id(request_id: str, index: int) -> str:
    """Returns vLLM's request id for a sample. Each sample is a separate vLLM request, because vLLM cannot end a single
    sample of a request.
    """
    return f"{request_id}#{index}"


def call(
    core: VllmCore, request: GenRequest, prompt: list[int], index: int, end_ids: frozenset[int], lora: object
) -> dict[str, Any]:
    """Returns the arguments of vLLM's `generate` for one sample. `lora` is vLLM's LoRARequest or None. The tokens of a
    resumed sample become part of its prompt.
    """
    modules, params = core.modules["sampling_params"], request.sampling
    if index < len(request.resume) and (done := request.resume[index].token_ids):
        prompt, params = [*prompt, *done], rest_of(params, len(done))
    fields = sampling_fields(
        params, index=index, room=core.max_model_len - len(prompt), end_ids=end_ids, vocab_size=core.vocab_size
    )
    if params.structured is not None:
        fields["structured_outputs"] = modules.StructuredOutputsParams(**structured_fields(params.structured))
    arguments = {
        "prompt": tokens_prompt(core, prompt, request.cache_salt),
        "sampling_params": modules.SamplingParams(output_kind=modules.RequestOutputKind.DELTA, **fields),
        "request_id": sample_id(request.request_id, index),
    }
    if "priority" in core.features:
        arguments["priority"] = request.priority
    if lora is not None:
        arguments["lora_request"] = lora
    return arguments


def rest_of(params: SamplingParams, num_tokens: int) -> SamplingParams:
    """Returns the sampling parameters for the rest of an output after its first `num_tokens` tokens."""
    max_tokens = None if params.max_tokens is None else params.max_tokens - num_tokens
    min_tokens = max(0, params.min_tokens - num_tokens)
    return replace(params, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=None)


def lost_on_resume(params: SamplingParams) -> list[str]:
    """Returns the options with which vLLM cannot continue a request: a presence or frequency penalty, bad words,
    structured output, or a seed for random sampling. vLLM keeps a state for each of these options, and builds this
    state only from tokens that it generated itself.
    """
    asked = {
        "seed": params.seed is not None and not params.is_greedy,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "bad_words": bool(params.bad_words),
        "structured": params.structured is not None,
    }
    return [name for name, wanted in asked.items() if wanted]


def check_request(request: GenRequest) -> None:
    """Raises UsageError for a resumed request that vLLM cannot continue, or a constraint that would kill vLLM."""
    if request.sampling.structured is not None:
        check_depth(request.sampling.structured)
        check_optional_parts(request.sampling.structured)
    lost = lost_on_resume(request.sampling)
    if lost and any(each.token_ids for each in request.resume):
        raise UsageError(
            f"request {request.request_id} cannot be resumed: vLLM cannot continue {', '.join(lost)} from tokens.",
            hint="Send it without resume.",
        )


def tokens_prompt(core: VllmCore, prompt: list[int], cache_salt: str) -> Any:
    """Returns vLLM's prompt object for these tokens. If this vLLM supports rendered prompts, the prompt is rendered
    here, which saves a thread switch.
    """
    inputs = core.modules["inputs"]
    salt = {"cache_salt": cache_salt} if cache_salt else {}
    if hasattr(inputs, "tokens_input"):
        return inputs.tokens_input(prompt, **salt)
    return inputs.TokensPrompt(prompt_token_ids=prompt, **salt)


def translated(core: VllmCore, request_id: str, error: Exception) -> RaytideError:
    """Returns raytide's error for an exception that vLLM raised for a request."""
    if isinstance(error, RaytideError):
        return error
    if core.is_dead:
        return died(f"request {request_id} is lost")
    client = getattr(core.modules["exceptions"], "VLLMClientError", ValueError)
    if isinstance(error, (client, ValueError)):
        return UsageError(f"request {request_id}: vLLM refuses it: {error}", hint="Correct the named parameter.")
    return EngineError(f"request {request_id} failed inside vLLM: {error.__cause__ or error!r}.")


def died(consequence: str) -> EngineDeadError:
    """Returns the error for a vLLM core that has died. The core cannot be restarted inside a running engine."""
    return EngineDeadError(
        f"the vLLM process has died: {consequence}.", hint="Retry on another replica; this one is to be replaced."
    )


def sampling_fields(
    params: SamplingParams, *, index: int, room: int, end_ids: Collection[int], vocab_size: int
) -> dict[str, Any]:
    """Returns the fields of vLLM's SamplingParams for one sample of a request. `room` is the number of tokens left in
    the context.

    The model's end-of-sequence tokens are passed as stop tokens, so that vLLM needs no tokenizer. raytide itself makes
    the text and finds stop strings, so vLLM gets no stop strings and makes no text.
    """
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(end_ids))
    fields: dict[str, Any] = {
        "max_tokens": min(params.max_tokens or room, room),
        "min_tokens": min(params.min_tokens, room),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": None if params.seed is None else (params.seed + index) % 2**63,  # its own -1 would mean none
        "stop_token_ids": sorted(token for token in stops if 0 <= token < vocab_size),  # another one kills its core
        "ignore_eos": True,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs if index == 0 else None,
        "detokenize": False,
    }
    if params.logit_bias:
        fields["logit_bias"] = dict(params.logit_bias)
    if params.bad_words:
        fields["bad_words"] = list(params.bad_words)
    return fields


def structured_fields(structured: Structured) -> dict[str, Any]:
    """Returns the fields of vLLM's StructuredOutputsParams."""
    if structured.kind == "choice":
        return {"choice": [structured.spec] if isinstance(structured.spec, str) else list(structured.spec)}
    if structured.kind == "json_schema":
        return {"json": "{}" if structured.spec in ("", "true") else _readable("json", str(structured.spec))}
    if structured.kind == "grammar":
        return {"grammar": _readable("grammar", str(structured.spec))}
    return {structured.kind: structured.spec}


@lru_cache(maxsize=16)  # vLLM gets a request per sample
def _readable(kind: str, text: str) -> str:
    try:
        return readable_grammar(text) if kind == "grammar" else json.dumps(readable(json.loads(text)))
    except (ValueError, RecursionError):
        return text  # vLLM refuses it itself


def token_logprobs(entry: Mapping[int, Any], token: int, count: int) -> TokenLogprobs:
    """Translates vLLM's log probabilities at one position. `entry` maps token ids to vLLM's log probabilities and
    ranks. It contains the chosen token, `token`, and the most likely tokens. The result contains the chosen token and
    the `count` most likely tokens.
    """
    best = sorted((each.rank, token_id, each.logprob) for token_id, each in entry.items() if each.rank <= count)
    chosen = entry[token]
    return TokenLogprobs(
        token, chosen.logprob, chosen.rank, tuple((token_id, logprob) for _, token_id, logprob in best[:count])
    )
