"""The work of a worker on a chunk: it surveys the chunk, encodes it to token ids, or does both in one pass."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from raytide.core.io.token_dataset import TokenDtype
from raytide.core.specs.data import TrainTokenizer
from raytide.pipelines.chunk_store import ChunkStore, Delivery, pack_blob
from raytide.pipelines.cleaning.corpus.substrings import Cuts, cut_words
from raytide.pipelines.filter import Examiner
from raytide.pipelines.inputs import InputChunk
from raytide.pipelines.readers.base import ReadOptions
from raytide.pipelines.survey import TEXT_CACHE, Selection, survey_chunk
from raytide.pipelines.tokenizer.bpe import TURN_END, TURN_START, train_bpe
from raytide.pipelines.tokenizer.engine import EngineSpec, agree, encode_marked, sample_of, turn_ids
from raytide.pipelines.writers.texts import texts_blob

BATCH_CHARS = 1 << 18
"""The number of characters encoded in one call: few enough that their ids stay in the processor's cache."""
SMALL = frozenset({"survey", "lengths"})
"""The kinds of results that the driver keeps in memory."""


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """Describes how texts become token ids: the engine, the data type, and `eos_id`, which follows each document."""

    engine: EngineSpec
    eos_id: int
    dtype: TokenDtype
    is_marked: bool
    """True if the texts are rendered conversations, with marks for special tokens."""

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids of all texts, number of ids of each text). The ids have type `dtype`, and `eos_id` follows each
        text.
        """
        engine, tokens, lengths = self.engine.open(), [], [np.zeros(0, np.int64)]
        turns = turn_ids(self.engine.tokenizer, TURN_START, TURN_END) if self.is_marked else None
        for batch in text_batches(texts):
            ids, counts = engine.encode(batch) if turns is None else encode_marked(engine, batch, *turns)
            tokens.append(with_eos(ids, counts, self.eos_id, self.dtype))
            lengths.append(counts + 1)
        return np.concatenate([np.zeros(0, self.dtype), *tokens]), np.concatenate(lengths)

    def is_exact(self, texts: list[str]) -> bool:
        """Returns whether the engine produces the same ids as `tokenizers` on a sample of the texts."""
        return self.engine.name == "tokenizers" or agree(self.engine.open(), self.engine.reference(), sample_of(texts))


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """A chunk to process, and the names under which its results are stored."""

    chunk: InputChunk
    survey: str
    texts: str = ""
    """The name of the stored texts; empty if the dataset does not hold the text too."""
    lengths: str = ""
    tokens: str = ""
    surveyed: Selection | None = None
    """The documents to encode; None if the chunk has not been surveyed."""
    cuts: Cuts = field(default_factory=dict)
    """The words to cut out of the documents."""

    @property
    def key(self) -> str:
        """The name of the chunk's texts in a worker's cache. Where possible, tasks with the same key go to the same
        worker.
        """
        return self.survey

    @property
    def where(self) -> str:
        """The files of the chunk, for error messages."""
        first, others = self.chunk.parts[0].url, len(self.chunk.parts) - 1
        return f"{first} or one of the {others} files after it" if others else first

    @property
    def names(self) -> set[str]:
        """The names of all stored results of the task."""
        return {self.survey, self.texts, self.lengths, self.tokens} - {""}


@dataclass(frozen=True, slots=True)
class ChunkStage:
    """The function that workers run on each chunk. It surveys the chunk, and encodes it if there is a plan."""

    store: ChunkStore
    options: ReadOptions
    examiner: Examiner
    plan: EncodePlan | None = None

    def __call__(self, task: ChunkTask) -> Delivery:
        blobs: dict[str, bytes] = {}
        if task.surveyed is None:
            survey, texts = survey_chunk(task.chunk.parts, self.options, self.examiner)
            if task.texts:
                blobs[task.texts] = texts_blob(texts)
            blobs[task.survey] = survey.to_blob()
            if self.plan is None:
                TEXT_CACHE.put(task.key, texts)
        else:
            cached = TEXT_CACHE.take(task.key)
            texts = cached if cached is not None else task.surveyed.read(self.options, self.examiner)
            texts = cut_words(texts, task.cuts)
        if self.plan is not None:
            blobs |= encode_texts(self.plan, texts, task)
        return self.store.hand_over(blobs, SMALL)


def encode_texts(plan: EncodePlan, texts: list[str], task: ChunkTask) -> dict[str, bytes]:
    """Returns the tokens of a chunk, and the number of tokens of each text. If the engine is not exact on the chunk,
    returns only a mark that says so.

    The lengths are stored after the tokens. If the lengths exist, the tokens exist.
    """
    if not plan.is_exact(texts):
        return {task.lengths: pack_blob({}, {"is_exact": False})}
    try:
        tokens, lengths = plan.encode(texts)
    except Exception:
        if plan.engine.name == "tokenizers":
            raise
        return {task.lengths: pack_blob({}, {"is_exact": False})}  # `tokenizers` decides what to do with such a text
    return {
        task.tokens: pack_blob({"tokens": tokens}, {}),
        task.lengths: pack_blob({"lengths": lengths}, {"is_exact": True}),
    }


def with_eos(ids: np.ndarray, lengths: np.ndarray, eos_id: int, dtype: TokenDtype) -> np.ndarray:
    """Returns the ids, converted to `dtype`, with `eos_id` after each document."""
    out = np.empty(len(ids) + len(lengths), np.dtype(dtype).newbyteorder("<"))
    ends = np.cumsum(lengths + 1) - 1
    is_id = np.ones(len(out), np.bool_)
    is_id[ends] = False
    out[is_id] = ids
    out[ends] = eos_id
    return out


def text_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yields lists of documents, each of about BATCH_CHARS characters."""
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


@dataclass(frozen=True, slots=True)
class LearnTask:
    """A sample of the corpus from which the tokenizer is learned."""

    selections: list[Selection]
    options: ReadOptions
    examiner: Examiner
    train: TrainTokenizer
    threads: int


def learn_tokenizer(task: LearnTask) -> bytes:
    """Learns a BPE tokenizer from a sample, which the worker reads itself. The worker uses `task.threads` threads."""
    os.environ["RAYON_NUM_THREADS"] = str(task.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    return train_bpe((text for each in task.selections for text in each.read(task.options, task.examiner)), task.train)
