"""raytide's sampling parameters and log probabilities in vLLM's terms, and back. No vLLM in here: its classes come as
arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from raytide.actors.engine.sampling_params import SamplingParams, Structured
from raytide.actors.engine.types import TokenLogprobs

__all__ = ["sampling_fields", "structured_fields", "token_logprobs"]


def sampling_fields(
    params: SamplingParams, *, index: int, room: int, end_ids: Collection[int], vocab_size: int
) -> dict[str, Any]:
    """The fields of vLLM's SamplingParams for one sample of a request. `room`: tokens left in the context.

    The model's end tokens go along as stop tokens, so that vLLM needs no tokenizer to know them. Text and stop strings
    are raytide's.
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
    """The fields of vLLM's StructuredOutputsParams."""
    if structured.kind == "choice":
        return {"choice": [structured.spec] if isinstance(structured.spec, str) else list(structured.spec)}
    if structured.kind == "json_schema":
        return {"json": structured.spec or "{}"}
    return {structured.kind: structured.spec}


def token_logprobs(entry: Mapping[int, Any], token: int, count: int) -> TokenLogprobs:
    """One position of vLLM's: token id -> log probability and rank, of the most likely ones and of the token itself."""
    best = sorted((each.rank, token_id, each.logprob) for token_id, each in entry.items() if each.rank <= count)
    chosen = entry[token]
    return TokenLogprobs(
        token, chosen.logprob, chosen.rank, tuple((token_id, logprob) for _, token_id, logprob in best[:count])
    )
