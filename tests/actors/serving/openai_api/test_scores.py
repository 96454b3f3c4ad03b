"""Scores and ranks: by a classification head as transformers computes it, else by the cosine of embeddings."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.actors.engine.families import save_family
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from raytide.actors.engine import EngineConfig, FakeEngine, NativeEngine
from raytide.actors.engine.base import Engine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.pooling import pooled_request
from raytide.actors.serving.openai_api.server import Server

QUERY = "def add(a, b)"
DOCUMENTS = ["return a + b", "import os", "print(the end)", "import os"]


def save_reranker(path: Path, labels: int = 1) -> Any:
    """A classifier whose tokenizer joins pairs by a special token, as rerankers' do."""
    model = save_family(path, "qwen3-tied", classifies=True, num_labels=labels)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", 0)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return model


@asynccontextmanager
async def client_of(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    server = Server(engine, model="m")
    await server.start()
    transport = httpx.ASGITransport(create_app(server, owns_server=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as http:
        yield http
    await server.stop()


def native(path: Path) -> NativeEngine:
    return NativeEngine(EngineConfig(model_dir=str(path), device="cpu", max_running=4, num_blocks=64))


@pytest.mark.asyncio
async def test_a_classification_head_scores_a_pair_as_transformers_does(tmp_path: Path) -> None:
    model = save_reranker(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    encoded = [tokenizer(QUERY, document, return_tensors="pt").input_ids for document in DOCUMENTS]
    with torch.inference_mode():
        expected = [float(model(ids).logits.sigmoid()) for ids in encoded]
    async with client_of(native(tmp_path)) as http:
        scored = (await http.post("/v1/score", json={"model": "m", "text_1": QUERY, "text_2": DOCUMENTS})).json()
        ranked = (await http.post("/v1/rerank", json={"model": "m", "query": QUERY, "documents": DOCUMENTS})).json()
        refused = await http.post("/v1/completions", json={"model": "m", "prompt": "x"})
    assert [each["score"] for each in scored["data"]] == pytest.approx(expected, abs=1e-5)
    assert (scored["method"], ranked["method"]) == ("cross_encoder", "cross_encoder")
    assert scored["usage"]["prompt_tokens"] == ranked["usage"]["total_tokens"] == sum(ids.numel() for ids in encoded)
    order = sorted(range(4), key=lambda index: -expected[index])
    assert [each["relevance_score"] for each in ranked["results"]] == pytest.approx(sorted(expected)[::-1], abs=1e-5)
    assert {each["index"] for each in ranked["results"][:1]} <= {order[0]} | {1, 3}
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@pytest.mark.asyncio
async def test_other_models_score_by_the_cosine_of_their_embeddings(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3-tied")
    async with client_of(native(tmp_path)) as http:
        embedded = await http.post("/v1/embeddings", json={"model": "m", "input": [QUERY, *DOCUMENTS]})
        body = {"model": "m", "text_1": [QUERY] * 4, "text_2": DOCUMENTS}
        scored = (await http.post("/v1/score", json=body)).json()
    query, *others = (np.array(each["embedding"]) for each in embedded.json()["data"])
    assert [each["score"] for each in scored["data"]] == pytest.approx(
        [float(query @ each) for each in others], abs=1e-5
    )
    assert scored["method"] == "bi_encoder"
    assert scored["usage"]["prompt_tokens"] < embedded.json()["usage"]["prompt_tokens"]  # equal texts are embedded once


@pytest.mark.asyncio
async def test_a_rank_has_the_best_documents_first_and_as_many_as_asked_for() -> None:
    async with client_of(FakeEngine()) as http:
        ask = {"model": "m", "query": "b", "documents": ["a", {"text": "b"}, "c"]}
        whole = (await http.post("/v1/rerank", json=ask)).json()
        first = (await http.post("/v2/rerank", json={**ask, "top_n": 1, "return_documents": False})).json()
    scores = [each["relevance_score"] for each in whole["results"]]
    assert scores == sorted(scores, reverse=True)
    assert whole["results"][0]["index"] == 1
    assert whole["results"][0]["document"] == {"text": "b"}
    assert math.isclose(scores[0], 1.0, abs_tol=1e-6)
    assert first["results"] == [{"index": 1, "relevance_score": scores[0]}]


@pytest.mark.asyncio
async def test_what_has_no_score_is_refused_by_name(tmp_path: Path) -> None:
    save_reranker(tmp_path, labels=3)
    async with client_of(native(tmp_path)) as http:
        labels = await http.post("/v1/score", json={"model": "m", "text_1": "a", "text_2": "b"})
    assert (labels.status_code, labels.json()["error"]["param"]) == (400, "model")
    assert "3 labels" in labels.json()["error"]["message"]
    async with client_of(FakeEngine(max_model_len=64)) as http:
        cases = {
            "text_1": {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
            "text_2": {"text_1": "a", "text_2": ["b", "c" * 99]},
            "truncate_prompt_tokens": {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 64},
        }
        for param, fields in cases.items():
            refused = await http.post("/v1/score", json={"model": "m", **fields})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.asyncio
async def test_pairs_beyond_the_limit_are_refused_before_all_are_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_request, "MAX_EMBEDDING_TOKENS", 50)
    save_reranker(tmp_path)
    engine, asked = native(tmp_path), [0]
    tokenize = engine.tokenize

    async def counted(*args: Any, **more: Any) -> list[int]:
        asked[0] += 1
        return await tokenize(*args, **more)

    monkeypatch.setattr(engine, "tokenize", counted)
    async with client_of(engine) as http:
        body = {"model": "m", "query": QUERY, "documents": ["x"] * 200}
        refused = await http.post("/v1/rerank", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    assert asked[0] < 51, "each pair has a token or more"
