"""The fast engine gives the ids of `tokenizers`, or `tokenizers` is used."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from raytide.core.errors import ClusterError, DataError
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.pipelines import build as build_module
from raytide.pipelines import encode
from raytide.pipelines.readers.conversation import TURN_END_MARK, TURN_START_MARK
from raytide.pipelines.runners.inline import InlineRunner
from raytide.pipelines.tokenizer import engine
from raytide.pipelines.tokenizer.bpe import SPECIAL_TOKENS, TURN_END, TURN_START, train_bpe
from raytide.pipelines.tokenizer.engine import (
    PROBES,
    EngineSpec,
    FastEngine,
    ReferenceEngine,
    agree,
    choose_engine,
    encode_marked,
    engine_versions,
    sample_of,
    turn_ids,
)

SpecOf = Callable[..., DataSpec]
BPE = train_bpe(
    ["the quick brown fox ünïcödé 漢字 1234 <|endoftext|> def f(x): return x\n" * 3], TrainTokenizer(vocab_size=400)
)
SAID = st.sampled_from([*SPECIAL_TOKENS, "<|im_", "end|>", " the", "\n"])
TEXTS = st.lists(st.lists(st.one_of(st.text(max_size=8), SAID), max_size=6).map("".join), max_size=6)


@given(TEXTS)
@example([*PROBES, *SPECIAL_TOKENS])
def test_both_engines_give_the_same_ids_for_any_text(texts: list[str]) -> None:
    assert agree(FastEngine(BPE), ReferenceEngine(BPE), texts)


@pytest.mark.parametrize("kind", [FastEngine, ReferenceEngine])
def test_special_tokens_that_are_spelled_out_are_text(kind: Any) -> None:
    special = {Tokenizer.from_str(BPE.decode()).token_to_id(token) for token in SPECIAL_TOKENS}
    ids, lengths = kind(BPE).encode([f"a{token}b {token}" for token in SPECIAL_TOKENS])
    assert special.isdisjoint(ids.tolist())
    assert (len(lengths), lengths.sum()) == (4, len(ids))


def test_the_fast_engine_is_chosen_for_a_tokenizer_that_it_knows() -> None:
    assert choose_engine(BPE).name == "fastokens"


def test_a_tokenizer_that_the_fast_engine_cannot_load_is_left_to_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("unknown pre-tokenizer")

    monkeypatch.setattr(engine, "FastEngine", refuse)
    assert choose_engine(BPE + b" ").name == "tokenizers"


def test_an_engine_that_differs_on_a_probe_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer with another normalizer stands for an engine with other Unicode tables."""
    other = json.loads(BPE) | {"normalizer": {"type": "NFKC"}}
    real = FastEngine
    monkeypatch.setattr(engine, "FastEngine", lambda _: real(json.dumps(other).encode()))
    assert choose_engine(BPE + b"  ").name == "tokenizers"


class Wrong(FastEngine):
    """Differs where a text holds `fox`."""

    def encode(self, texts: Sequence[str]) -> tuple[Any, Any]:
        return super().encode([text.replace("fox", "dog") for text in texts])


class Broken(FastEngine):
    """Fails where a text holds `fox`."""

    def encode(self, texts: Sequence[str]) -> tuple[Any, Any]:
        if any("fox" in text for text in texts):
            raise RuntimeError("backtracking limit")
        return super().encode(texts)


@pytest.mark.parametrize("kind", [Wrong, Broken])
@pytest.mark.parametrize("threads", [1, 3])
def test_one_document_on_which_they_differ_leaves_the_whole_build_to_the_reference(
    corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch, kind: Any, threads: int
) -> None:
    given = TokenizerSpec(file=str(corpus.parent / "bpe.json"))
    Path(given.file or "").write_bytes(BPE)
    good = build_module.build(spec_of(corpus, tokenizer=given), runner=InlineRunner())
    assert good.source.engine == "fastokens"
    assert good.source.engines == dict(engine_versions())
    monkeypatch.setattr(engine, "FastEngine", kind)
    engine._open.cache_clear()
    again = spec_of(corpus, tokenizer=given, out=str(corpus.parent / "again"))
    manifest = build_module.build(again, runner=InlineRunner(threads))
    engine._open.cache_clear()
    assert manifest.source.engine == "tokenizers"
    assert manifest.shards == good.shards
    assert manifest.source.digest == good.source.digest


def test_a_build_that_was_killed_after_the_difference_was_found_finds_it_without_encoding_again(
    corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "FastEngine", Wrong)
    engine._open.cache_clear()
    real, seen, kills = encode.encode_texts, list[str](), iter([KeyboardInterrupt])

    def kill(plan: encode.EncodePlan, *rest: Any) -> Any:
        seen.append(plan.engine.name)
        if plan.engine.name == "tokenizers" and (error := next(kills, None)) is not None:
            raise error
        return real(plan, *rest)

    monkeypatch.setattr("raytide.pipelines.inputs.MAX_CHUNK_PARTS", 5)
    monkeypatch.setattr(encode, "encode_texts", kill)
    with pytest.raises(KeyboardInterrupt):
        build_module.build(spec_of(corpus), runner=InlineRunner())
    seen.clear()
    manifest = build_module.build(spec_of(corpus), runner=InlineRunner())
    engine._open.cache_clear()
    assert manifest.source.engine == "tokenizers"
    assert "fastokens" not in seen


def test_a_node_with_another_version_of_an_engine_is_an_error_that_names_both() -> None:
    spec = EngineSpec("fastokens", BPE, (("fastokens", "0.0.1"), ("tokenizers", "0.0.2")))
    with pytest.raises(ClusterError, match=r"this node has fastokens .*; the build started with fastokens 0\.0\.1 and"):
        spec.open()


@given(st.lists(st.text(max_size=50), max_size=40))
def test_the_checked_sample_is_small_and_of_the_texts(texts: list[str]) -> None:
    sample = sample_of(texts)
    assert bool(sample) == bool(texts)
    assert all(any(piece in text for text in texts) for piece in sample)


def test_the_checked_sample_is_a_500th_of_a_large_chunk() -> None:
    texts = ["x" * 10_000] * 400
    assert 7000 <= sum(map(len, sample_of(texts))) <= 8000


def test_the_checked_pieces_are_from_all_parts_of_the_texts() -> None:
    text = "".join(f"{i:05d} " for i in range(1000))
    starts = [text.index(piece) for piece in sample_of([text] * 32)]
    assert len(set(starts)) == len(starts)
    assert min(starts) == 0
    assert max(starts) > 0.9 * len(text)


MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=20)), max_size=4)


@given(st.lists(MESSAGES, max_size=5))
def test_rendered_conversations_get_the_ids_of_the_tokenizer_s_own_special_tokens(
    conversations: list[list[tuple[str, str]]],
) -> None:
    """Golden: `tokenizers`, with special tokens recognised, on the text with the tokens spelled out."""
    texts = [
        "".join(f"{TURN_START_MARK}{role}\n{content}{TURN_END_MARK}\n" for role, content in messages)
        for messages in conversations
    ]
    start_id, end_id = turn_ids(BPE, TURN_START, TURN_END)
    reference = Tokenizer.from_str(BPE.decode())
    spelled = [text.replace(TURN_START_MARK, TURN_START).replace(TURN_END_MARK, TURN_END) for text in texts]
    wanted = [reference.encode(text, add_special_tokens=False).ids for text in spelled]
    ids, lengths = encode_marked(FastEngine(BPE), texts, start_id, end_id)
    assert lengths.tolist() == [len(each) for each in wanted]
    assert ids.tolist() == [token for each in wanted for token in each]


def test_a_tokenizer_without_turn_tokens_cannot_encode_conversations() -> None:
    body = json.loads(BPE)
    body["added_tokens"] = []
    for token in SPECIAL_TOKENS:
        body["model"]["vocab"].pop(token, None)
    with pytest.raises(DataError, match=r"no tokens <.im_start.> and <.im_end.>"):
        turn_ids(json.dumps(body).encode(), TURN_START, TURN_END)


def test_eos_follows_each_document() -> None:
    tokens = encode.with_eos(np.array([5, 6, 7], np.uint32), np.array([2, 0, 1]), 9, "uint16")
    assert tokens.tolist() == [5, 6, 9, 9, 7, 9]
    assert tokens.dtype == np.dtype("<u2")
