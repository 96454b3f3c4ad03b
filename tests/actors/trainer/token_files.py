"""Token datasets made of given documents, for the trainer's tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

EOS = 0


def random_documents(count: int, *, longest: int, vocab: int = 96, seed: int = 0) -> list[list[int]]:
    """Documents of 1 to `longest` tokens, the end token included, which a model can learn something about."""
    random = np.random.default_rng(seed)
    steps = (random.integers(1, 4, size=int(random.integers(0, longest))) for _ in range(count))
    return [[*(np.cumsum(each) % (vocab - 1) + 1).tolist(), EOS] for each in steps]


def write_documents(
    path: Path, documents: Sequence[Sequence[int]], *, vocab: int = 96, shards: int = 3, tokenizer: str = "{}"
) -> Path:
    """Writes the documents as a dataset of version 1, which has no index, in `shards` files that split documents."""
    stream = np.concatenate([np.asarray(document, "<u2") for document in documents])
    cuts = [len(stream) * number // shards for number in range(shards + 1)]
    (path / "shards").mkdir(parents=True)
    entries = []
    for number, (begin, end) in enumerate(pairwise(cuts)):
        body, file = stream[begin:end].tobytes(), f"shards/{number:05d}.bin"
        (path / file).write_bytes(body)
        entries.append({"file": file, "tokens": end - begin, "sha256": hashlib.sha256(body).hexdigest()})
    manifest = {
        "version": 1,
        "vocab_size": vocab,
        "eos_id": EOS,
        "dtype": "uint16",
        "documents": len(documents),
        "tokens": len(stream),
        "shards": entries,
    }
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "tokenizer_config.json").write_text("{}")
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path
