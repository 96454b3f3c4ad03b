"""The second pass over a corpus: actors turn kept documents into token ids."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from raytide.core.io.token_dataset import TokenDtype
from raytide.core.specs.data import TrainTokenizer
from raytide.pipelines.bpe import load_bpe, train_bpe
from raytide.pipelines.runner import batch_tasks
from raytide.pipelines.survey import Pick

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Tokenizer

PIECE_CHARS = 1 << 22
"""Documents are encoded and sent on in pieces of about this much text, to bound an actor's memory."""


class Encoder:
    """Made once in each actor. A result row has the ids of some documents, `eos_id` after each, and their lengths."""

    def __init__(self, tokenizer: bytes, eos_id: int, dtype: TokenDtype, text_column: str) -> None:
        # One process for each CPU of the lease: the library's own threads would take more than was leased.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.tokenizer = load_bpe(tokenizer, "the tokenizer")
        self.eos_id = eos_id
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.text_column = text_column

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        import pyarrow as pa

        pick: Pick
        for pick in batch_tasks(batch):
            for piece in pieces(pick.read(self.text_column)):
                documents = encode_documents(self.tokenizer, piece, self.eos_id)
                lengths = np.array([len(ids) for ids in documents], np.int64)
                flat = np.fromiter((i for ids in documents for i in ids), self.dtype, int(lengths.sum()))
                yield pa.table(
                    {
                        "tokens": pa.array([flat.tobytes()], pa.large_binary()),
                        "lengths": pa.array([lengths.tobytes()], pa.large_binary()),
                    }
                )


def encode_documents(tokenizer: Tokenizer, documents: list[str], eos_id: int) -> list[list[int]]:
    encodings = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return [[*encoding.ids, eos_id] for encoding in encodings]


def pieces(documents: Iterable[str]) -> Iterator[list[str]]:
    """Runs of whole documents of about PIECE_CHARS."""
    held: list[str] = []
    chars = 0
    for document in documents:
        held.append(document)
        chars += len(document)
        if chars >= PIECE_CHARS:
            yield held
            held, chars = [], 0
    if held:
        yield held


def learn_tokenizer(job: tuple[list[Pick], str, TrainTokenizer, int]) -> bytes:
    """The Ray task that learns the BPE: reads the sample itself, and keeps to as many threads as it has CPUs."""
    picks, text_column, wanted, threads = job
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    return train_bpe((text for pick in picks for text in pick.read(text_column)), wanted)
