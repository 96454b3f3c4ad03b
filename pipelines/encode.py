"""The second pass over a corpus: actors encode kept documents to token ids."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from raytide.core.io.token_dataset import TokenDtype
from raytide.core.specs.data import TrainTokenizer
from raytide.pipelines.bpe import load_bpe, train_bpe
from raytide.pipelines.runner import batch_tasks
from raytide.pipelines.survey import Selection

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Tokenizer

BATCH_CHARS = 1 << 22
"""Text per result row, in characters, which bounds an actor's memory."""


class Encoder:
    """Encodes documents; created once per actor. A row has the ids of some documents, `eos_id` after each, and their
    lengths."""

    def __init__(self, tokenizer: bytes, eos_id: int, dtype: TokenDtype, text_column: str) -> None:
        # There is one process per leased CPU: the library's threads would use more CPUs than leased.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.tokenizer = load_bpe(tokenizer, "the tokenizer")
        self.eos_id = eos_id
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.text_column = text_column

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        import pyarrow as pa

        selection: Selection
        for selection in batch_tasks(batch):
            for documents_batch in text_batches(selection.read(self.text_column)):
                documents = encode_documents(self.tokenizer, documents_batch, self.eos_id)
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


def text_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yields lists of documents of about BATCH_CHARS."""
    batch_texts: list[str] = []
    chars = 0
    for document in documents:
        batch_texts.append(document)
        chars += len(document)
        if chars >= BATCH_CHARS:
            yield batch_texts
            batch_texts, chars = [], 0
    if batch_texts:
        yield batch_texts


def learn_tokenizer(job: tuple[list[Selection], str, TrainTokenizer, int]) -> bytes:
    """Learn a BPE: the Ray task reads the sample itself and uses as many threads as it has CPUs."""
    selections, text_column, options, threads = job
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    return train_bpe((text for selection in selections for text in selection.read(text_column)), options)
