"""Reads the tokenizer of a GGUF file. The result is the `tokenizer.json` that the same model has on Hugging Face.

The file holds the vocabulary, the merges, and the name of the regular expression that splits texts before they are
encoded. The expressions are those of llama.cpp's `llama-vocab.cpp`. An unknown name is refused, because a different
split would give different tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raytide.actors.models.quantized.gguf.gguf_file import GgufFile
from raytide.core.bounds import shortened
from raytide.core.errors import ConfigError, DataError

Json = dict[str, Any]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""The kinds of tokens that are recognized in a text before it is split."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _bytes(*, splits: bool) -> Json:
    """Returns the pre-tokenizer that maps bytes to characters; with `splits` it first splits by GPT-2's expression."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


def _split(expression: str) -> Json:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _bytes(splits=False)]}


_GPT2: Json = {"pre_tokenizer": _bytes(splits=True)}
_SMOLLM: Json = {
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _bytes(splits=True)],
    }
}
_LLAMA3: Json = {
    "pre_tokenizer": _split(_CONTRACTIONS + _WORDS % "{1,3}"),
    "ignore_merges": True,
    "add_bos": True,  # as in llama.cpp: files of Llama 3 seldom have the field
}
_QWEN2: Json = {"pre_tokenizer": _split(_CONTRACTIONS + _WORDS % ""), "normalizer": {"type": "NFC"}}

_SPLITS: Mapping[str, Json] = {
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _SMOLLM,
}


def tokenizer_json(file: GgufFile) -> bytes:
    """Returns the tokenizer of a GGUF file as JSON. Raises ConfigError for a type of tokenizer that is not supported.
    Raises DataError if the file is damaged.
    """
    kind, splits = file.text("tokenizer.ggml.model"), file.text("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or splits not in _SPLITS:
        raise ConfigError(
            f"{file.where}: tokenizer {shortened(kind, 50)}, splits {shortened(splits, 50)}, is not supported.",
            hint=f"Supported: gpt2 (byte-level BPE) with {', '.join(_SPLITS)}. Else use the Hugging Face directory.",
        )
    rules, tokens, kinds = _SPLITS[splits], file.texts("tokenizer.ggml.tokens"), _kinds(file)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise DataError(f"{file.where}: two tokens are the same text.", hint="Download or convert the model again.")
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": each != _USER_DEFINED,
        }
        for index, each in enumerate(kinds[: len(tokens)])
        if each in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,  # no secret  # nosec B105
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": rules.get("ignore_merges", False),
        "vocab": vocabulary,
        "merges": file.texts("tokenizer.ggml.merges"),
    }
    body = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": rules.get("normalizer"),
        "pre_tokenizer": rules["pre_tokenizer"],
        "post_processor": _post_processor(file, tokens, adds_bos=rules.get("add_bos", False)),
        "decoder": _bytes(splits=True),
        "model": model,
    }
    return json.dumps(body).encode()


def tokenizer_config(file: GgufFile) -> Json:
    """Returns a GGUF file's special tokens and chat template as the fields of a `tokenizer_config.json`."""
    tokens = file.texts("tokenizer.ggml.tokens")
    found: Json = {}
    for name in ("bos", "eos"):
        if (index := _token_id(file, name, len(tokens))) is not None:
            found[f"{name}_token"] = tokens[index]
    if "tokenizer.chat_template" in file:
        found["chat_template"] = file.text("tokenizer.chat_template")
    return found


def _kinds(file: GgufFile) -> list[int | float]:
    field = "tokenizer.ggml.token_type"
    return file.numbers(field) if field in file else []


def _token_id(file: GgufFile, name: str, count: int) -> int | None:
    field = f"tokenizer.ggml.{name}_token_id"
    if field not in file:
        return None
    if not 0 <= (index := int(file.number(field))) < count:
        raise DataError(f"{file.where}: {field} {index} is no token.", hint="Download or convert the model again.")
    return index


def _post_processor(file: GgufFile, tokens: list[str], *, adds_bos: bool) -> Json | None:
    """Returns the post-processor that puts the beginning-of-text token before a text and the end-of-text token behind
    it; None if the file asks for neither. `adds_bos` is used if the file does not say whether the former is added.
    """
    added = dict[str, int]()
    for name, default in {"bos": adds_bos, "eos": False}.items():
        index = _token_id(file, name, len(tokens))
        if index is not None and file.flag(f"tokenizer.ggml.add_{name}_token", default):
            added[name] = index
    if not added:
        return None

    def framed(text: str) -> list[Json]:
        special = {name: {"SpecialToken": {"id": tokens[index], "type_id": 0}} for name, index in added.items()}
        whole = special.get("bos"), {"Sequence": {"id": text, "type_id": 0}}, special.get("eos")
        return [each for each in whole if each is not None]

    return {
        "type": "TemplateProcessing",
        "single": framed("A"),
        "pair": framed("A") + framed("B"),
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]} for index in added.values()
        },
    }
