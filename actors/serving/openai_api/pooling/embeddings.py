"""The route /v1/embeddings: vectors of texts or token lists, as floats or as base64 of little-endian float32."""

from __future__ import annotations

import base64
from typing import Literal

import numpy as np
from pydantic import BaseModel

from raytide.actors.serving.openai_api.admission import RequestCaller
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.fields.truncation import Truncation
from raytide.actors.serving.openai_api.params import refuse_unknown
from raytide.actors.serving.openai_api.pooling.pooled_request import PooledRequest, compute
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import Inputs


class EmbeddingRequest(PooledRequest):
    input: Inputs
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


async def embed(server: Server, request: EmbeddingRequest, caller: RequestCaller) -> EmbeddingList:
    server.check_name(request.model)
    server.require("embeddings", param="model")
    refuse_unknown(request)
    if request.dimensions is not None:
        raise invalid("dimensions is not supported by this model server.", param="dimensions")
    cut = Truncation.of(request, server.info.max_model_len, side="right")
    prompts = await server.prompts(request.input, field="input", cut=cut)
    vectors, tokens = await compute(server, caller, prompts, server.engine.embed, param="input")
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
