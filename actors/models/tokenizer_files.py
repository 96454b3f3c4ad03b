"""The files of a model directory besides weights and config: tokenizer, generation config, chat template."""

from __future__ import annotations

from pathlib import Path

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
