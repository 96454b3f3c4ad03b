"""The files of a model directory besides weights and config: tokenizer, generation config, chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytide.actors.models.model_config import read_bytes, read_json, read_text
from raytide.actors.models.quantized.gguf.gguf_config import end_token_ids
from raytide.actors.models.quantized.gguf.gguf_file import GgufFile, is_gguf
from raytide.actors.models.quantized.gguf.gguf_tokenizer import tokenizer_config, tokenizer_json
from raytide.core.errors import DataError

_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)

POOLING_FILES = (
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
    "modules.json",
    "sentence_bert_config.json",
)
"""The files by which sentence-transformers and vLLM pool the hidden states of an embedding model."""

WITH_TOKENIZER = "Export the model with its tokenizer.json."


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The parts of a model's tokenizer, read from the files of a directory or from a GGUF file."""

    where: str
    tokenizer: bytes
    config: dict[str, Any]
    generation: dict[str, Any]
    chat_template: str | None

    @classmethod
    def read(cls, model: Path) -> TokenizerSource:
        """Reads the parts of a model's tokenizer. Raises DataError if a file is unreadable. Raises ConfigError if the
        tokenizer comes from a GGUF file and is not supported.
        """
        if is_gguf(model):
            file = GgufFile(model)
            config = tokenizer_config(file)
            template = config.get("chat_template")
            return cls(file.where, tokenizer_json(file), config, {"eos_token_id": end_token_ids(file)}, template)
        path = model / "tokenizer.json"
        tokenizer, config = read_bytes(path, WITH_TOKENIZER), _optional_json(model / "tokenizer_config.json")
        template = chat_template(model, config)
        return cls(str(path), tokenizer, config, _optional_json(model / "generation_config.json"), template)


def chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template of a model directory, or None without one. `config` is its `tokenizer_config.json`. As
    in transformers, a list of named templates stands for the one named `default`, and `chat_template.json` is the
    older file of models that read images. Raises DataError if there is no such template, or if it is no text.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    of_processor = _optional_json(folder / "chat_template.json").get("chat_template")
    found: object = of_processor or config.get("chat_template") or None
    if isinstance(found, list):
        named = (each for each in found if isinstance(each, dict) and each.get("name") == "default")
        found = next(named, {}).get("template", found)
    if found is not None and not isinstance(found, str):
        raise DataError(f"{folder}: its default chat template is no text.", hint="Put it into chat_template.jinja.")
    return found


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Returns the paths of the tokenizer files that exist in the directory, by file name."""
    return {name: folder / name for name in _NAMES if (folder / name).is_file()}


def tokenizer_digest(path: Path) -> str:
    """Returns a digest of everything in a `tokenizer.json` that affects the encoding. JSON layout, padding and
    truncation do not change the digest.
    """
    body = {key: value for key, value in read_json(path).items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
