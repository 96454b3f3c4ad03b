"""The steps that all pooling requests share: a size check, the caller's admission, and the billing of tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from pydantic import ConfigDict

from raytide.actors.engine.limits import MAX_EMBEDDING_TOKENS
from raytide.actors.engine.types import TokenUsage
from raytide.actors.serving.openai_api.admission import RequestCaller
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.fields.truncation import TruncationFields
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import NO_EFFECT, Name, only_these

Vectors = list[list[float]]
Work = Callable[..., Awaitable[Vectors]]
"""A method of the engine, such as `embed`."""


class PooledRequest(TruncationFields):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, json_schema_extra=only_these(NO_EFFECT))

    model: Name


def check_tokens(tokens: int, param: str) -> None:
    """Raises ApiError if the inputs of a request together have too many tokens. `tokens` is their total number."""
    if tokens > MAX_EMBEDDING_TOKENS:
        raise invalid(f"{param} has {tokens} tokens; at most {MAX_EMBEDDING_TOKENS} are taken at once.", param=param)


async def compute(
    server: Server, caller: RequestCaller, prompts: Sequence[list[int]], work: Work, *, param: str
) -> tuple[Vectors, int]:
    """Returns the vectors of the prompts, and the number of prompt tokens. `work` is the engine's method that computes
    the vectors. Raises ApiError if there are too many tokens or the caller is not admitted.
    """
    tokens = sum(map(len, prompts))
    check_tokens(tokens, param)
    grant = await caller.admit(server.model, tokens, 0)
    try:
        result = await work(prompts, lora=server.lora)
    except BaseException:
        grant.release()
        raise
    grant.settle(TokenUsage(tokens, 0), 200, version=server.version or server.info.weights_version)
    return result, tokens
