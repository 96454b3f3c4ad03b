"""The messages between an engine's process and its clients: msgpack arrays whose first item is the message kind.

One connection carries many requests. The outputs of one engine step for all requests are one message, so that neither
side does work in Python for every single token. Nothing is pickled, so neither side has to trust code from the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from enum import IntEnum
from typing import Any

import msgpack

from raytide.actors.engine.sampling_params import SamplingParams, Structured
from raytide.actors.engine.types import (
    ChatFormat,
    DiskCounts,
    DraftCounts,
    EngineInfo,
    EngineStats,
    GenChunk,
    GenRequest,
    Message,
    PromptOptions,
    SampleProgress,
    Timing,
    TokenLogprobs,
    TokenUsage,
    ToolCallTurn,
)
from raytide.core.errors import EngineError, RaytideError

VERSION = 9
_DEFAULT = SamplingParams()
MAX_MESSAGE_BYTES = 64 << 20
"""The most bytes of a message, and of unread input; more end the connection."""
STATUS_PERIOD_S = 0.25
NEWS_PERIOD_S = 0.02
"""The shortest time between two statuses that are sent because of another client's new request."""


class Kind(IntEnum):
    """The kind of a message, which is the first item of the message. The comment of each kind lists the other items."""

    OPEN = 0  # version, secret: the client's first message
    HELLO = 1  # the engine's description: the answer
    CALL = 2  # id, method, arguments
    RESULT = 3  # id, value: ends a call
    GENERATE = 4  # id, request, seconds that it has waited, prefix for other clients, peer or None, new tokens
    CHUNKS = 5  # [[id, chunk], ...], bytes of tokens with log probabilities that are new here: the output of one step
    ERROR = 6  # id, error: ends a call or a generation
    CLOSE = 7  # id: the client wants no more of a generation
    STATUS = 8  # statistics, load counters, problem or None, whether it drains, pending tokens: every STATUS_PERIOD_S
    PREFIXES = 9  # prefixes that other clients have sent since the last status
    PART = 10  # id, bytes: a part of what a call returns beside its value, before it


def pack(message: Sequence[object]) -> bytes:
    packed: bytes = msgpack.packb(message, use_bin_type=True, unicode_errors="replace")
    return packed


def unpacker() -> msgpack.Unpacker:
    """Returns a parser for a stream of messages: feed it bytes, and iterate over it to get the complete messages."""
    return msgpack.Unpacker(raw=False, use_list=True, max_buffer_size=MAX_MESSAGE_BYTES, strict_map_key=False)


def pack_request(request: GenRequest) -> dict[str, Any]:
    packed = {each.name: getattr(request, each.name) for each in fields(request)}
    del packed["session"], packed["keep_answer"], packed["may_be_running"]
    packed["resume"] = [(each.token_ids, each.finish_reason) for each in request.resume]
    packed["sampling"] = sampling = _changed(request.sampling)
    if request.sampling.structured is not None:
        sampling["structured"] = [request.sampling.structured.kind, request.sampling.structured.spec]
    return packed


def unpack_request(packed: Mapping[str, Any]) -> GenRequest:
    """Returns the request from its packed form. Raises UsageError for parameters out of range, and TypeError for
    unknown parameters.
    """
    sampling = dict(packed["sampling"])
    if structured := sampling.pop("structured", None):
        kind, spec = structured
        sampling["structured"] = Structured(kind, spec if isinstance(spec, str) else tuple(spec))
    resume = tuple(SampleProgress(tuple(tokens), reason) for tokens, reason in packed["resume"])
    images = tuple(packed["images"])
    return GenRequest(**{**packed, "sampling": SamplingParams(**sampling), "resume": resume, "images": images})


def read_request(packed: Mapping[str, Any]) -> GenRequest:
    """Returns the request from its packed form, as `unpack_request` does. Raises EngineError if the request is from
    another release of raytide.
    """
    try:
        return unpack_request(packed)
    except RaytideError:
        raise
    except Exception as error:
        raise EngineError(f"the request cannot be read: {error!r}.", hint="Are both sides of one release?") from error


def scores_of(chunk: GenChunk) -> list[TokenLogprobs]:
    """Returns the log probabilities of the chunk's tokens and of prompt tokens. The first prompt token has none."""
    return [each for each in (*(chunk.logprobs or ()), *(chunk.prompt_logprobs or ())) if each is not None]


def pack_chunk(chunk: GenChunk) -> list[Any]:
    """Returns the fields of a chunk in order. A plain chunk of text has only the first three fields."""
    usage, timing, marks, prompt = chunk.usage, chunk.timing, chunk.logprobs, chunk.prompt_logprobs
    packed: list[Any] = [chunk.index, chunk.token_ids, chunk.text]
    if chunk.finish_reason or marks is not None or prompt is not None:
        packed += [
            chunk.finish_reason,
            usage and (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            timing and (timing.queue_s, timing.prefill_s, timing.decode_s),
            marks and [_pack_logprobs(each) for each in marks],
            prompt and [each and _pack_logprobs(each) for each in prompt],
            chunk.stop,
        ]
    return packed


def unpack_chunk(request_id: str, packed: Sequence[Any]) -> GenChunk:
    if len(packed) == 3:
        return GenChunk(request_id, packed[1], packed[2], index=packed[0])
    index, tokens, text, reason, usage, timing, marks, prompt, stop = packed
    return GenChunk(
        request_id,
        tokens,
        text,
        reason,
        usage and TokenUsage(*usage),
        timing and Timing(*timing),
        index,
        None if marks is None else tuple(map(_unpack_logprobs, marks)),
        None if prompt is None else tuple(each and _unpack_logprobs(each) for each in prompt),
        stop=stop,
    )


def pack_info(info: EngineInfo) -> dict[str, Any]:
    """Returns an engine's description for its clients. The feature "kv_transfer" is renamed "handover", because KV goes
    directly between engine processes and never through a client.
    """
    handover = {"handover"} if "kv_transfer" in info.features else set[str]()
    return {**asdict(info), "features": sorted(info.features - {"kv_transfer"} | handover)}


def unpack_info(packed: Mapping[str, Any]) -> EngineInfo:
    return EngineInfo(**{**packed, "features": frozenset(packed["features"]), "chat": ChatFormat(**packed["chat"])})


def pack_stats(stats: EngineStats) -> dict[str, Any]:
    return asdict(stats)


def unpack_stats(packed: Mapping[str, Any]) -> EngineStats:
    speculation = tuple(DraftCounts(**each) for each in packed["speculation"])
    disk = packed["disk"] and DiskCounts(**packed["disk"])
    listed = packed["adapters"]
    adapters = listed if isinstance(listed, Mapping) else dict.fromkeys(listed, "")  # older releases send a list
    return EngineStats(**{**packed, "adapters": adapters, "speculation": speculation, "disk": disk})


def pack_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [asdict(message) for message in messages]


def unpack_messages(packed: Iterable[Mapping[str, Any]]) -> list[Message]:
    return [
        Message(
            **{
                **each,
                "tool_calls": tuple(ToolCallTurn(**call) for call in each["tool_calls"]),
                "parts": tuple(each["parts"]),
            }
        )
        for each in packed
    ]


def pack_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    """Returns tools as JSON text. msgpack cannot encode integers beyond 64 bits, and the tools' schemas may contain
    such integers.
    """
    return json.dumps(list(tools))


def unpack_tools(packed: str) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = json.loads(packed)
    return tools


def pack_options(options: PromptOptions) -> str:
    """Returns a prompt's options as JSON text. JSON is used because the options may have numbers of more than 64 bits,
    which msgpack cannot represent.
    """
    return json.dumps({"template_kwargs": options.template_kwargs, "ending": options.ending})


def unpack_options(packed: str) -> PromptOptions:
    return PromptOptions(**json.loads(packed))


def pack_error(error: Exception) -> dict[str, str]:
    if not isinstance(error, RaytideError):
        error = EngineError(f"the engine's process failed: {error!r}.")
    return error.to_json()


def _changed(params: SamplingParams) -> dict[str, Any]:
    """Returns the parameters that differ from their defaults."""
    named = ((each.name, getattr(params, each.name)) for each in fields(params))
    return {name: value for name, value in named if value != getattr(_DEFAULT, name)}


def _pack_logprobs(each: TokenLogprobs) -> tuple[int, float, int, tuple[tuple[int, float], ...]]:
    return each.token_id, each.logprob, each.rank, each.top


def _unpack_logprobs(packed: Sequence[Any]) -> TokenLogprobs:
    token, logprob, rank, top = packed
    return TokenLogprobs(token, logprob, rank, tuple((token, value) for token, value in top))
