from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.engine.tiny import VOCAB, save_tokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer

from raytide.actors.engine.text.detokenizer import Detokenizer, Vocabulary
from raytide.actors.engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bytelevel")
    save_tokenizer(path)
    rust = RustTokenizer.from_file(str(path / "tokenizer.json"))
    rust.add_tokens([AddedToken("→tool←"), AddedToken("a b")])
    rust.add_special_tokens(["<|im_end|>"])
    rust.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


WORDS = (
    "▁the",
    "▁tide",
    "s",
    "▁",
    "▁▁",
    "é",
    "▁日本",
    ".",
    "▁.",
    "'s",
    "\ufffd",
    " ",
    "##ing",
    "##s",
    "n't",
    "end</w>",
    "</w>",
)

DECODERS = {
    "llama 2, mistral": [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ],
    "gemma": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    "metaspace": [decoders.Metaspace()],
    "metaspace, never prepended": [decoders.Metaspace(prepend_scheme="never")],
    "metaspace with bytes": [decoders.ByteFallback(), decoders.Metaspace()],
    "wordpiece": [decoders.WordPiece()],
    "word ends": [decoders.BPEDecoder()],
    "bytes in a sequence": [decoders.Replace("▁", "Ġ"), decoders.ByteLevel()],
    "none": None,
}


def pieced(path: Path, name: str) -> Tokenizer:
    """Pieces as SentencePiece and WordPiece have them, byte tokens, added tokens, and one of the decoders."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in WORDS:
        vocab[word] = len(vocab)
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = DECODERS[name]
    if steps is not None:
        rust.decoder = decoders.Sequence(steps) if len(steps) > 1 else steps[0]
    rust.add_tokens([AddedToken("→tool←"), AddedToken("<0xe2>")])
    rust.add_special_tokens(["</s>"])
    rust.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


@pytest.fixture(scope="module", params=DECODERS)
def any_pieced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return pieced(tmp_path_factory.mktemp("pieced"), request.param)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return pieced(tmp_path_factory.mktemp("llama2"), "llama 2, mistral")


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
@given(tokens=st.lists(st.one_of(st.integers(0, 290), st.integers(257, 280), st.integers(195, 245)), max_size=25))
def test_pieces_add_up_to_the_whole_decode_for_any_ids_and_decoder(any_pieced: Tokenizer, tokens: list[int]) -> None:
    assert "".join(pieces(Vocabulary(any_pieced).stream(), tokens)) == any_pieced.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(257, 273), min_size=1, max_size=12))
def test_text_is_not_held_back_without_need(byte_fallback: Tokenizer, tokens: list[int]) -> None:
    stream = Vocabulary(byte_fallback).stream()
    assert "".join(stream.push(token) for token in tokens) == byte_fallback.decode(tokens)


def test_the_work_for_a_piece_does_not_grow_with_the_text(
    byte_fallback: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, decode = [0], Vocabulary.decode

    def counted(self: Vocabulary, ids: list[int]) -> str:
        decoded[0] += len(ids)
        return decode(self, ids)

    monkeypatch.setattr(Vocabulary, "decode", counted)
    pieces(Vocabulary(byte_fallback).stream(), [257 + place % 9 for place in range(2000)] + [0x41] * 2000)
    assert decoded[0] <= 3 * 4000


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


def test_a_token_alone_stands_for_what_it_is_in_mid_text(byte_fallback: Tokenizer, byte_level: Tokenizer) -> None:
    pieced, whole = Vocabulary(byte_fallback), Vocabulary(byte_level)
    found = {word: pieced.token_bytes(byte_fallback.rust.token_to_id(word)) for word in ("▁the", "s", "<0xE2>", "</s>")}
    assert found == {"▁the": b" the", "s": b"s", "<0xE2>": b"\xe2", "</s>": b"</s>"}
    text = "a 🌊 of text, and more"
    assert b"".join(map(whole.token_bytes, byte_level.encode(text))) == text.encode()
