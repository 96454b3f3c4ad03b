"""A small corpus with one document for each way to be dropped."""

from collections.abc import Callable
from pathlib import Path

import pytest

from raytide.core.specs.data import DataSpec, TextFilter, TokenizerSpec, TrainTokenizer

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "while",
    "ünïcode",
    "☃",
    "snow",
    "falls",
    "on",
    "return",
    "self",
    "def",
    "class",
]


def sentence(i: int) -> str:
    return " ".join(WORDS[(i * 7 + k * k) % len(WORDS)] for k in range(5 + i % 11)) + f" {i}.\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """40 good documents in nested folders, 5 bad ones."""
    root = tmp_path / "corpus"
    (root / "deep" / "er").mkdir(parents=True)
    for i in range(40):
        folder = root if i % 3 else root / "deep" / "er"
        (folder / f"{i:02d}.txt").write_text(sentence(i))
    (root / "99-copy.txt").write_text(sentence(1))
    (root / "empty.txt").write_text("")
    (root / "latin1.txt").write_bytes("größe".encode("latin-1"))
    (root / "long.txt").write_text("x " * 3000)
    (root / "wide.txt").write_text("y" * 500)
    return root


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., DataSpec]:
    def make(*inputs: Path | str, **changes: object) -> DataSpec:
        defaults: dict[str, object] = {
            "inputs": tuple(str(url) for url in inputs),
            "out": str(tmp_path / "out"),
            "filter": TextFilter(max_chars=4000, max_line_chars=400),
            "tokenizer": TokenizerSpec(train=TrainTokenizer(vocab_size=320, sample_documents=20)),
            "shard_tokens": 100,
        }
        return DataSpec.model_validate(defaults | changes)

    return make
