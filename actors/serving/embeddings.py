"""/v1/embeddings: vectors of texts or token lists, as floats or as base64 of little-endian float32."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from raytide.actors.serving.errors import invalid
from raytide.actors.serving.server import Server

__all__ = ["EmbeddingList", "EmbeddingRequest", "embed"]


class EmbeddingRequest(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    input: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def embed(server: Server, request: EmbeddingRequest) -> EmbeddingList:
    await server.check_alive()
    server.card(request.model)
    server.require("embeddings", param="model")
    if request.dimensions is not None:
        raise invalid("dimensions is not supported by this model server.", param="dimensions")
    prompts = await server.prompts(request.input, field="input")
    vectors = await server.engine.embed(prompts)
    tokens = sum(map(len, prompts))
    return EmbeddingList(
        data=[
            Embedding(index=index, embedding=_packed(vector) if request.encoding_format == "base64" else vector)
            for index, vector in enumerate(vectors)
        ],
        model=server.model,
        usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
    )


def _packed(vector: list[float]) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
