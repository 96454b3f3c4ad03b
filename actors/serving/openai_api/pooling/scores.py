"""The routes /v1/score and /v1/rerank: how well texts match a query, in the formats that vLLM, Jina and Cohere share.

A model with a classification head reads both texts at once (a cross-encoder). Any other model embeds each text, and
the score is the cosine of the two vectors (a bi-encoder). The answer's field `method` says which method computed the
scores.
"""

from __future__ import annotations

import math
import time
from typing import Annotated, Literal
from uuid import uuid4

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from raytide.actors.engine.limits import MAX_EMBEDDING_INPUTS
from raytide.actors.serving.openai_api.admission import RequestCaller
from raytide.actors.serving.openai_api.answers.bodies import ABSENT
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.fields.truncation import Truncation
from raytide.actors.serving.openai_api.params import refuse_unknown
from raytide.actors.serving.openai_api.pooling.embeddings import EmbeddingUsage
from raytide.actors.serving.openai_api.pooling.pooled_request import PooledRequest, check_tokens, compute
from raytide.actors.serving.openai_api.server import Server

Method = Literal["cross_encoder", "bi_encoder"]
_Text = Annotated[str, Field(min_length=1)]
_Texts = _Text | Annotated[list[_Text], Field(fail_fast=True, min_length=1, max_length=MAX_EMBEDDING_INPUTS)]


class ScoreRequest(PooledRequest):
    """A request to score pairs of texts. There are three forms:

    - `text_1` and `text_2` are one text each.
    - `text_1` is one text, which is paired with each text of `text_2`.
    - `text_1` and `text_2` are lists of equal length, which are paired in order.
    """

    text_1: _Texts
    text_2: _Texts


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    text: _Text


class RerankRequest(PooledRequest):
    query: _Text
    documents: Annotated[list[_Text | Document], Field(fail_fast=True, min_length=1, max_length=MAX_EMBEDDING_INPUTS)]
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    return_documents: bool = True


class Score(BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    method: Method
    usage: EmbeddingUsage


class RankedDocument(BaseModel):
    """A document's index in the request and its relevance score. `document` is left out if the request did not ask for
    it.
    """

    index: int
    relevance_score: float
    document: Document | None = ABSENT


class Ranking(BaseModel):
    """The documents, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    method: Method
    usage: EmbeddingUsage


async def score(server: Server, request: ScoreRequest, caller: RequestCaller) -> ScoreList:
    server.check_name(request.model)
    refuse_unknown(request)
    first = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    second = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise invalid(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: text_1 must have one, or as many.", param="text_1"
        )
    pairs = list(zip(first, second, strict=True))
    scores, tokens, method = await _scores(server, request, pairs, caller, ("text_1", "text_2"))
    return ScoreList(
        id=f"score-{uuid4().hex}",
        created=int(time.time()),
        model=server.model,
        data=[Score(index=index, score=each) for index, each in enumerate(scores)],
        method=method,
        usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
    )


async def rerank(server: Server, request: RerankRequest, caller: RequestCaller) -> Ranking:
    server.check_name(request.model)
    refuse_unknown(request)
    texts = [each if isinstance(each, str) else each.text for each in request.documents]
    pairs = [(request.query, text) for text in texts]
    scores, tokens, method = await _scores(server, request, pairs, caller, ("query", "documents"))
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: request.top_n or None]
    return Ranking(
        id=f"rerank-{uuid4().hex}",
        model=server.model,
        results=[
            RankedDocument(
                index=index,
                relevance_score=scores[index],
                document=Document(text=texts[index]) if request.return_documents else None,
            )
            for index in order
        ],
        method=method,
        usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
    )


async def _scores(
    server: Server,
    request: PooledRequest,
    pairs: list[tuple[str, str]],
    caller: RequestCaller,
    fields: tuple[str, str],
) -> tuple[list[float], int, Method]:
    """Returns the score of each pair, the number of tokens that were computed, and the method."""
    cut = Truncation.of(request, server.info.max_model_len, side="right")
    if "classification" in server.info.features:
        if server.info.num_labels != 1:
            raise invalid(
                f"{server.model} tells {server.info.num_labels} labels apart: that is no single score.", param="model"
            )
        prompts, count = list[list[int]](), 0
        for text, pair in pairs:  # each repeats the query, so all of them may not fit in memory
            prompts.append(await server.tokens(text, pair, field=fields[1], cut=cut))
            check_tokens(count := count + len(prompts[-1]), fields[1])
        logits, tokens = await compute(server, caller, prompts, server.engine.classify, param=fields[1])
        return [_sigmoid(logit) for (logit,) in logits], tokens, "cross_encoder"
    server.require("embeddings", param="model")
    texts = {text: field for pair in pairs for text, field in zip(pair, fields, strict=True)}  # each is embedded once
    embedded = [await server.tokens(text, field=field, cut=cut) for text, field in texts.items()]
    vectors, tokens = await compute(server, caller, embedded, server.engine.embed, param=fields[1])
    by_text = dict(zip(texts, np.asarray(vectors), strict=True))
    cosines = [float(by_text[text] @ by_text[pair]) for text, pair in pairs]
    return cosines, tokens, "bi_encoder"


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
