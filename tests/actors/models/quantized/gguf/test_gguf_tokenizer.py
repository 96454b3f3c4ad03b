"""A tokenizer built from a GGUF file's fields encodes as the one whose vocabulary and merges it holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from tests.actors.models.quantized.gguf.gguf_files import field, header, text
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from raytide.actors.models.quantized.gguf.gguf_config import end_token_ids
from raytide.actors.models.quantized.gguf.gguf_file import GgufFile
from raytide.actors.models.quantized.gguf.gguf_tokenizer import tokenizer_config, tokenizer_json
from raytide.core.errors import ConfigError, DataError

TEXTS = (
    "def f(x1, y22):\n\treturn 12345 + x1  # it's OK, we'll see\r\n\n",
    "  Grüße aus Köln,  naïve cafe\u0301 e\u0301! 1234567 ½ ² IT'S",
    "<|end|>中文字符 и русский 🙂🙃\u00a0x<|end|> ",
    "\n\n\n   \t x'd 'Re",
)
_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _START + r"\p{N}{1,3}" + _END, _START + r"\p{N}" + _END


def trained(splits: str) -> Tokenizer:
    """Returns a tokenizer as the models of this name have it on Hugging Face."""
    tokenizer, plain = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_regex = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if splits in ("llama-bpe", "qwen2"):
        expression = Regex(_LLAMA3 if splits == "llama-bpe" else _QWEN2)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(expression, "isolated"), plain])
    elif splits == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_regex])
    else:
        tokenizer.pre_tokenizer = by_regex
    if splits == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|end|>", "<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([argparse.__file__], trainer)
    return tokenizer


def saved(path: Path, tokenizer: Tokenizer, splits: str, *more: bytes) -> GgufFile:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [str(tokenizer.id_to_token(index)) for index in range(tokenizer.get_vocab_size())]
    kinds = b"".join((3 if token in ("<|end|>", "<s>") else 1).to_bytes(4, "little") for token in tokens)
    types = text("tokenizer.ggml.token_type") + b"".join(
        number.to_bytes(size, "little") for number, size in ((9, 4), (5, 4), (len(tokens), 8))
    )
    fields = [
        field("tokenizer.ggml.model", "gpt2"),
        field("tokenizer.ggml.pre", splits),
        field("tokenizer.ggml.tokens", tokens),
        types + kinds,
        field("tokenizer.ggml.merges", [" ".join(each) if isinstance(each, list) else each for each in merges]),
        *more,
    ]
    path.write_bytes(header(fields))
    return GgufFile(path)


@pytest.mark.parametrize("splits", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_it_encodes_and_decodes_as_the_original(splits: str, tmp_path: Path) -> None:
    original = trained(splits)
    ours = Tokenizer.from_buffer(tokenizer_json(saved(tmp_path / "t.gguf", original, splits)))
    for each in TEXTS:
        assert ours.encode(each).ids == original.encode(each).ids
        assert ours.decode(ours.encode(each).ids) == original.decode(original.encode(each).ids)


def test_a_beginning_of_text_is_put_first_where_the_file_asks_for_it(tmp_path: Path) -> None:
    original = trained("gpt-2")
    add = text("tokenizer.ggml.add_bos_token") + b"\7\0\0\0\1"
    file = saved(tmp_path / "t.gguf", original, "gpt-2", field("tokenizer.ggml.bos_token_id", 1), add)
    ours = Tokenizer.from_buffer(tokenizer_json(file))
    original.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    assert ours.encode(TEXTS[0]).ids == original.encode(TEXTS[0]).ids
    assert ours.encode(TEXTS[0], add_special_tokens=False).ids[0] != 1
    assert tokenizer_config(file) == {"bos_token": "<s>"}


def flag(name: str, value: bool) -> bytes:
    return text(f"tokenizer.ggml.{name}") + b"\7\0\0\0" + bytes([value])


def test_a_text_of_llama_3_begins_with_its_token_unless_the_file_says_no(tmp_path: Path) -> None:
    original, bos = trained("llama-bpe"), field("tokenizer.ggml.bos_token_id", 1)
    plain = original.encode(TEXTS[0]).ids
    ours = Tokenizer.from_buffer(tokenizer_json(saved(tmp_path / "a.gguf", original, "llama-bpe", bos)))
    assert ours.encode(TEXTS[0]).ids == [1, *plain]
    file = saved(tmp_path / "b.gguf", original, "llama-bpe", bos, flag("add_bos_token", False))
    assert Tokenizer.from_buffer(tokenizer_json(file)).encode(TEXTS[0]).ids == plain


def test_an_end_of_text_is_put_last_where_the_file_asks_for_it(tmp_path: Path) -> None:
    original, eos = trained("qwen2"), field("tokenizer.ggml.eos_token_id", 0)
    file = saved(tmp_path / "a.gguf", original, "qwen2", eos, flag("add_eos_token", True))
    ours, plain = Tokenizer.from_buffer(tokenizer_json(file)), original.encode(TEXTS[0]).ids
    assert ours.encode(TEXTS[0]).ids == [*plain, 0]
    assert ours.encode(TEXTS[0], "x").ids == [*plain, 0, *original.encode("x").ids, 0]
    bos = field("tokenizer.ggml.bos_token_id", 1), flag("add_bos_token", True)
    file = saved(tmp_path / "b.gguf", original, "qwen2", eos, flag("add_eos_token", True), *bos)
    assert Tokenizer.from_buffer(tokenizer_json(file)).encode(TEXTS[0]).ids == [1, *plain, 0]


def test_an_answer_ends_at_each_token_that_ends_a_turn_of_the_family(tmp_path: Path) -> None:
    names = ["a", "<|eot_id|>", "<|end_of_text|>", "b", "<|eom_id|>", "<|im_end|>", "<|endoftext|>"]
    fields = [field("tokenizer.ggml.tokens", names), field("tokenizer.ggml.eos_token_id", 2)]
    path = tmp_path / "t.gguf"
    path.write_bytes(header(fields))
    assert end_token_ids(GgufFile(path)) == [2, 1, 4, 5, 6]
    path.write_bytes(header(fields[1:]))
    assert end_token_ids(GgufFile(path)) == [2]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, ConfigError, "tokenizer llama, splits gpt-2, is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, ConfigError, "splits tekken, is not supported"),
        ({"tokenizer.ggml.pre": None}, ConfigError, "splits default"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, DataError, "two tokens are the same text"),
        ({"tokenizer.ggml.tokens": "a"}, DataError, "tokens is not a list of texts"),
        ({"tokenizer.ggml.merges": None}, DataError, "merges is missing"),
        ({"tokenizer.ggml.bos_token_id": 9}, DataError, "bos_token_id 9 is no token"),
    ],
)
def test_what_would_give_other_tokens_is_refused(
    fields: dict[str, object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    whole = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
        **fields,
    }
    path = tmp_path / "t.gguf"
    path.write_bytes(header([field(name, value) for name, value in whole.items() if value is not None]))  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        tokenizer_json(GgufFile(path))
