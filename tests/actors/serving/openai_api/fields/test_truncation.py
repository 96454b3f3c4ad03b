"""Prompts that are cut at `truncate_prompt_tokens`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.actors.engine.families import save_family
from tests.actors.serving.openai_api.test_scores import DOCUMENTS, QUERY, client_of, native, save_reranker
from tokenizers import Tokenizer

from raytide.actors.engine import FakeEngine
from raytide.actors.serving.openai_api.fields.truncation import Truncation, TruncationFields

TEXT = "one two three four five six seven eight"


async def echoed(http: Any, prompt: object, **fields: object) -> str:
    body = {"model": "m", "prompt": prompt, "echo": True, "max_tokens": 1, **fields}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text[:-1]


@pytest.mark.asyncio
async def test_a_completion_keeps_the_last_tokens_or_the_first_ones() -> None:
    async with client_of(FakeEngine(max_model_len=64)) as http:
        assert await echoed(http, TEXT, truncate_prompt_tokens=5) == "eight"
        assert await echoed(http, TEXT, truncate_prompt_tokens=3, truncation_side="right") == "one"
        assert await echoed(http, [*b"one two"], truncate_prompt_tokens=3) == "two"
        assert await echoed(http, [[*b"one two"]], truncate_prompt_tokens=3) == "two"
        assert await echoed(http, "one", truncate_prompt_tokens=60) == "one"
        assert await echoed(http, "a" * 99 + "b" * 60, truncate_prompt_tokens=-1) == "a" * 3 + "b" * 60
        long = await http.post(
            "/v1/completions", json={"model": "m", "prompt": "x" * 99, "max_tokens": 20, "truncate_prompt_tokens": -1}
        )
        assert long.json()["usage"] == long.json()["usage"] | {"prompt_tokens": 44, "completion_tokens": 20}


@pytest.mark.asyncio
async def test_a_chat_is_cut_like_a_completion() -> None:
    async with client_of(FakeEngine(max_model_len=64)) as http:
        ask = {"model": "m", "messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 1}
        for fields in ({}, {"truncation_side": "right"}):
            answer = await http.post("/v1/chat/completions", json={**ask, "truncate_prompt_tokens": 10, **fields})
            assert answer.json()["usage"]["prompt_tokens"] == 10


@pytest.mark.asyncio
@pytest.mark.parametrize("length", [0, -2, 64, 2**31, 1.5, "5", True])
async def test_a_length_that_no_prompt_has_is_refused(length: object) -> None:
    async with client_of(FakeEngine(max_model_len=64)) as http:
        for path, fields in (
            ("completions", {"prompt": "x"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("embeddings", {"input": "x"}),
            ("score", {"text_1": "x", "text_2": "y"}),
            ("rerank", {"query": "x", "documents": ["y"]}),
        ):
            body = {"model": "m", **fields, "truncate_prompt_tokens": length}
            refused = await http.post(f"/v1/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.asyncio
async def test_embeddings_of_long_texts_are_those_of_their_beginnings(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3-tied")
    text = " ".join(DOCUMENTS * 40)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    assert len(ids) > 512
    async with client_of(native(tmp_path)) as http:

        async def embedded(given: object, **fields: object) -> list[float]:
            answer = await http.post("/v1/embeddings", json={"model": "m", "input": given, **fields})
            assert answer.json()["usage"]["prompt_tokens"] == 12
            vector: list[float] = answer.json()["data"][0]["embedding"]
            return vector

        whole = await http.post("/v1/embeddings", json={"model": "m", "input": text})
        assert whole.status_code == 400, "it is longer than the context"
        for fields, kept in (({}, ids[:12]), ({"truncation_side": "left"}, ids[-12:])):
            cut = await embedded(text, truncate_prompt_tokens=12, **fields)
            assert cut == pytest.approx(await embedded(kept), abs=1e-5)


@pytest.mark.asyncio
async def test_of_a_pair_the_second_text_is_cut(tmp_path: Path) -> None:
    save_reranker(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = " ".join(DOCUMENTS)
    before = len(tokenizer.encode(QUERY).ids)
    ids = tokenizer.encode(QUERY, text).ids
    shorter, length = tokenizer.decode(ids[before : before + 6]), before + 7
    assert tokenizer.encode(QUERY, shorter).ids == [*ids[: before + 6], ids[-1]]
    async with client_of(native(tmp_path)) as http:

        async def scored(second: str, **fields: object) -> float:
            body = {"model": "m", "text_1": QUERY, "text_2": second, **fields}
            answer = (await http.post("/v1/score", json=body)).json()
            assert answer["usage"]["prompt_tokens"] == length
            score: float = answer["data"][0]["score"]
            return score

        assert await scored(text, truncate_prompt_tokens=length) == pytest.approx(await scored(shorter), abs=1e-6)
        body = {"model": "m", "query": QUERY, "documents": [text], "truncate_prompt_tokens": length}
        ranked = (await http.post("/v1/rerank", json=body)).json()
        assert ranked["usage"]["prompt_tokens"] == length
        refused = await http.post("/v1/rerank", json={**body, "truncate_prompt_tokens": length - 6})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


@given(st.lists(st.sampled_from(["a", "bb", " ", "\n", "ccc ccc"]), max_size=60).map("".join), st.integers(1, 29))
def test_the_end_of_a_text_beyond_the_context_is_that_of_the_whole_text(text: str, length: int) -> None:
    """With a token for each character, and an engine that reads 32 of a text, as engines cut what is too long."""
    import asyncio

    async def tokenize(given: str) -> list[int]:
        return [1, *(ord(char) + 9 for char in given[:32]), 2]

    fields = TruncationFields(truncate_prompt_tokens=length + 2)
    cut = Truncation.of(fields, 32, side="left")
    assert cut is not None
    expected = [1, *([ord(char) + 9 for char in text][-length:]), 2]
    assert asyncio.run(cut.text(text, tokenize)) == expected
