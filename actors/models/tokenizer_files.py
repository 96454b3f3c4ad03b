"""The files of a model directory besides weights and config: tokenizer, generation config, chat template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from raytide.actors.models.model_config import read_json

_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Returns the files that the directory has, by name."""
    return {name: folder / name for name in _NAMES if (folder / name).is_file()}


def tokenizer_digest(path: Path) -> str:
    """Returns a digest of what the tokenizer encodes, independent of JSON layout, padding and truncation."""
    body = {key: value for key, value in read_json(path).items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
