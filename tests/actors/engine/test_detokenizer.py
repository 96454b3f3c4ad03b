from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.engine.tiny import VOCAB, save_tokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer

from raytide.actors.engine.detokenizer import Detokenizer, Vocabulary
from raytide.actors.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bytelevel")
    save_tokenizer(path)
    rust = RustTokenizer.from_file(str(path / "tokenizer.json"))
    rust.add_tokens([AddedToken("→tool←"), AddedToken("a b")])
    rust.add_special_tokens(["<|im_end|>"])
    rust.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A decoder in Llama 2's manner: a space is U+2581, unknown characters are byte tokens."""
    path = tmp_path_factory.mktemp("fallback")
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in ("▁the", "▁tide", "s", "▁", "é", "▁日本"):
        vocab[word] = len(vocab)
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def pieces(stream: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.flush()]


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.one_of(st.integers(0, VOCAB + 2), st.integers(100, 260)), max_size=30))
def test_byte_level_pieces_add_up_to_the_whole_decode_for_any_ids(byte_level: Tokenizer, tokens: list[int]) -> None:
    assert "".join(pieces(Vocabulary(byte_level).stream(), tokens)) == byte_level.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_no_half_character_is_ever_emitted(byte_level: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    tokens = byte_level.encode(text)
    got = pieces(Vocabulary(byte_level).stream(), tokens)
    assert not any("\ufffd" in piece for piece in got)
    assert "".join(got) == byte_level.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.sampled_from(["▁the", "▁tide", "s", "▁", "é", "▁日本", "🌊", "ß", "漢"]), max_size=12))
def test_other_decoders_stream_valid_text_exactly(byte_fallback: Tokenizer, words: list[str]) -> None:
    tokens: list[int] = []
    for word in words:
        known = byte_fallback.rust.token_to_id(word)
        tokens += [known] if known is not None else [byte + 1 for byte in word.encode()]
    got = pieces(Vocabulary(byte_fallback).stream(), tokens)
    assert not any("\ufffd" in piece for piece in got)
    assert "".join(got) == byte_fallback.decode(tokens)


def test_an_emoji_split_over_tokens_comes_out_once_and_whole(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("🌊!")
    assert len(tokens) == 5
    assert pieces(Vocabulary(byte_level).stream(), tokens) == ["", "", "", "🌊", "!", ""]


def test_special_tokens_leave_no_text(byte_level: Tokenizer, tmp_path: Path) -> None:
    end = byte_level.rust.token_to_id("<|im_end|>")
    assert pieces(Vocabulary(byte_level).stream(), [end, byte_level.encode("x")[0], end]) == ["", "x", "", ""]
