"""Examines every document of a corpus, and decides which documents are kept. This happens before a tokenizer is learned
or tokens are written.

Each document is examined in the worker that reads it. The driver keeps 17 bytes for each document and no text, so a
corpus may be larger than the cluster's memory. Steps that need the whole corpus, such as dropping duplicates, run
afterwards.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from raytide.core.errors import DataError
from raytide.pipelines.chunk_store import pack_blob, unpack_blob
from raytide.pipelines.cleaning.fingerprints import Fingerprints, fingerprint
from raytide.pipelines.cleaning.report import CleaningCounts
from raytide.pipelines.cleaning.stages import Place
from raytide.pipelines.filter import Examined, Examiner, ReasonTable, Survey, survey_from_bytes
from raytide.pipelines.inputs import InputChunk
from raytide.pipelines.readers.base import InputPart, ReadOptions, Record
from raytide.pipelines.readers.registry import read_parts

CACHED_CHARS = 96 << 20
"""The most characters of text that a process keeps between the two passes, so that small corpora are read once."""
SAMPLES_PER_REASON = 20
SAMPLE_CHARS = 400


@dataclass(frozen=True, slots=True)
class DropSample:
    """A dropped document that is kept as a sample, for inspection."""

    reason: str
    file: str
    row: int
    """The record's number in its file, from 0."""
    detail: str
    text: str
    """The beginning of the document's text."""


@dataclass(frozen=True, slots=True)
class ChunkSurvey:
    """The verdicts on a chunk's documents, and samples of dropped documents.

    The row of a sample is relative to its chunk: row 0 is the chunk's first row from the same file.
    """

    counts: NDArray[np.int64]
    """The number of documents in each part."""
    found: Survey
    samples: tuple[DropSample, ...] = ()
    cleaning: CleaningCounts = field(default_factory=CleaningCounts)
    fingerprints: Fingerprints = field(default_factory=Fingerprints)

    def to_blob(self) -> bytes:
        samples = [[s.reason, s.file, s.row, s.detail, s.text] for s in self.samples]
        digests = np.frombuffer(self.found.digests.tobytes(), np.uint8)
        arrays: dict[str, np.ndarray] = {"counts": self.counts, "verdicts": self.found.verdicts, "digests": digests}
        about = {"reasons": self.found.reasons, "samples": samples, "cleaning": self.cleaning.to_json()}
        return pack_blob(arrays | self.fingerprints.arrays(), about)

    @classmethod
    def from_blob(cls, blob: bytes, name: str) -> ChunkSurvey:
        arrays, about = unpack_blob(blob, name)
        reasons, samples, cleaning = about["reasons"], about["samples"], about["cleaning"]
        assert isinstance(reasons, list)
        assert isinstance(samples, list)
        assert isinstance(cleaning, list)
        found = survey_from_bytes(arrays["verdicts"].tobytes(), arrays["digests"].tobytes(), tuple(reasons))
        dropped = tuple(DropSample(*sample) for sample in samples)
        counts = CleaningCounts.from_json(cleaning)
        return cls(arrays["counts"], found, dropped, counts, Fingerprints.from_arrays(arrays))


def survey_chunk(parts: Sequence[InputPart], options: ReadOptions, examiner: Examiner) -> tuple[ChunkSurvey, list[str]]:
    """Reads and examines all documents of a chunk. Returns the verdicts, and the texts of the documents that are not
    dropped.
    """
    counts = [0] * len(parts)
    table, sampled, cleaning = ReasonTable(), Counter[str](), CleaningCounts()
    verdicts, digests = bytearray(), bytearray()
    texts: list[str] = []
    samples: list[DropSample] = []
    for part, record, examined in examine_parts(parts, options, examiner):
        verdicts.append(table.code(examined.reason))
        digests += examined.digest(record)
        if (cleaned := examined.cleaned) is not None:
            is_kept = cleaned.is_kept
            cleaning.add(len(cleaned.text), is_kept=is_kept, language=cleaned.language, changes=cleaned.changes)
        if examined.text is not None:
            texts.append(examined.text)
        elif sampled[examined.reason] < SAMPLES_PER_REASON:
            sampled[examined.reason] += 1
            samples.append(_drop_sample(examined, record, parts[part].url, _row(parts, counts, part)))
        counts[part] += 1
    found = survey_from_bytes(bytes(verdicts), bytes(digests), tuple(table.reasons))
    fingerprints = fingerprint(texts, None if examiner.cleaner is None else examiner.cleaner.spec)
    return ChunkSurvey(np.array(counts, np.int64), found, tuple(samples), cleaning, fingerprints), texts


def examine_parts(
    parts: Sequence[InputPart], options: ReadOptions, examiner: Examiner
) -> Iterator[tuple[int, Record, Examined]]:
    """Yields each document of the parts, with the index of its part and the record that it came from."""
    if examiner.cleaner is None:
        for part, record in read_parts(parts, options):
            yield part, record, examiner.examine(record)
        return
    found = list(read_parts(parts, options))
    counts = [0] * len(parts)
    places = []
    for part, _ in found:
        places.append(_place(parts, counts, part))
        counts[part] += 1
    documents = examiner.examine_all([record for _, record in found], places)
    for (part, record), made in zip(found, documents, strict=True):
        for each in made:
            yield part, record, each


def _place(parts: Sequence[InputPart], counts: Sequence[int], part: int) -> Place:
    """Returns the place of the next record of a part. Rows of a later piece of JSONL count from where it starts."""
    row, first = _row(parts, counts, part), parts[_first_of_file(parts, part)]
    if first.span is None or first.reader != "jsonl":
        return Place(first.url, row + (0 if first.span is None else first.span[1]))
    return Place(first.url, row, first.span[0])


def _drop_sample(examined: Examined, record: Record, url: str, row: int) -> DropSample:
    if examined.cleaned is not None:  # its personal data and secrets are replaced already
        begin = examined.cleaned.text
    else:
        begin = record[: 4 * SAMPLE_CHARS].decode(errors="replace") if isinstance(record, bytes) else ""
    return DropSample(examined.reason, url, row, examined.detail[:SAMPLE_CHARS], begin[:SAMPLE_CHARS])


def _row(parts: Sequence[InputPart], counts: Sequence[int], part: int) -> int:
    """Returns the number of the next record of a part, counted from the first part of its file in the chunk."""
    return sum(counts[_first_of_file(parts, part) : part + 1])


def _first_of_file(parts: Sequence[InputPart], part: int) -> int:
    while part and parts[part - 1].url == parts[part].url:
        part -= 1
    return part


class TextCache:
    """A cache of the chunk texts that this process has read. It holds up to CACHED_CHARS characters. A full cache takes
    no more texts.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[str, list[str]] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def put(self, key: str, texts: list[str]) -> None:
        chars = sum(map(len, texts))
        with self._lock:
            if key in self._texts or self._chars + chars > CACHED_CHARS:
                return  # chunks are read in the same order again: those that came first are needed first
            self._texts[key] = texts
            self._chars += chars

    def take(self, key: str) -> list[str] | None:
        """Removes and returns the cached texts of a chunk. Returns None if this process has not cached them."""
        with self._lock:
            texts = self._texts.pop(key, None)
            self._chars -= sum(map(len, texts)) if texts else 0
            return texts

    def clear(self) -> None:
        with self._lock:
            self._texts.clear()
            self._chars = 0


TEXT_CACHE = TextCache()


@dataclass(frozen=True, slots=True)
class Selection:
    """Some parts of the inputs, with a mask of the selected documents in these parts."""

    parts: tuple[InputPart, ...]
    keep: NDArray[np.bool_]
    digests: bytes
    """Digests of all documents of the parts, to detect changes since the survey."""

    def read(self, options: ReadOptions, examiner: Examiner) -> list[str]:
        """Reads and returns the selected documents. Raises DataError if an input has changed since the survey."""
        found = [(record, each) for _, record, each in examine_parts(self.parts, options, examiner)]
        if b"".join(each.digest(record) for record, each in found) != self.digests:
            where = (
                self.parts[0].url
                if len(self.parts) == 1
                else f"{self.parts[0].url} or one of the {len(self.parts) - 1} files after it"
            )
            raise DataError(
                f"{where} was changed during the build.", hint="Build again once the inputs no longer change."
            )
        texts = (each.text for (_, each), keep in zip(found, self.keep, strict=True) if keep)
        return [text for text in texts if text is not None]


@dataclass(slots=True)
class Corpus:
    """A surveyed corpus. `found` contains the verdicts on all documents, in the order of the documents. `counts`
    contains the number of documents in each part of the chunks.
    """

    chunks: tuple[InputChunk, ...]
    counts: NDArray[np.int64]
    found: Survey
    samples: tuple[DropSample, ...] = ()
    near: dict[int, int] = field(default_factory=dict)
    """The document of which each dropped near-duplicate is one; -1 if that is in an earlier dataset."""
    examined: NDArray[np.bool_] = field(init=False)
    """A mask of the documents that passed the steps on single documents; these are encoded."""

    def __post_init__(self) -> None:
        self.examined = self.found.keep

    def bounds(self) -> NDArray[np.int64]:
        """Returns the index of the first document of each chunk, followed by the number of all documents."""
        parts = np.cumsum([0, *(len(chunk.parts) for chunk in self.chunks)])
        bounds: NDArray[np.int64] = self._starts()[parts]
        return bounds

    def selections(self) -> Iterator[Selection]:
        """Yields a selection for each chunk: the documents that are to be encoded."""
        bounds = self.bounds()
        for chunk, start, end in zip(self.chunks, bounds[:-1], bounds[1:], strict=True):
            yield self._select(chunk.parts, start, end, self.examined)

    def sample(self, documents: int, seed: int) -> list[Selection]:
        """Returns a selection of about `documents` kept documents. The selection is filled part by part, in random
        order of the parts, so that few row groups are read.
        """
        parts = self._parts()
        starts, left, selections = self._starts(), documents, {}
        for i in random.Random(seed).sample(range(len(parts)), len(parts)):
            selection = self._select((parts[i],), starts[i], starts[i + 1], self.found.keep)
            if (kept := int(np.count_nonzero(selection.keep))) == 0:
                continue
            selection.keep[np.flatnonzero(selection.keep)[left:]] = False
            selections[i] = selection
            left -= kept
            if left <= 0:
                break
        return [selections[i] for i in sorted(selections)]

    def sampled_drops(self, options: ReadOptions, examiner: Examiner) -> list[DropSample]:
        """Returns samples of dropped documents: for each reason the first ones in dataset order, up to a limit.

        The text of a document is read again if a step over the whole corpus dropped the document.
        """
        taken, drops = Counter[str](), list[DropSample]()
        for sample in (*self.samples, *self._dropped_by_corpus_steps(options, examiner)):
            taken[sample.reason] += 1
            if taken[sample.reason] <= SAMPLES_PER_REASON:
                drops.append(sample)
        return drops

    def place(self, document: int) -> tuple[str, int]:
        """Returns the file of a document, and its row in that file."""
        part = self._part_of(document)
        return self._parts()[part].url, int(document - self._starts()[part] + self.first_rows()[part])

    def _text(self, document: int, options: ReadOptions, examiner: Examiner) -> str:
        """Returns the beginning of a document's text; empty if a record can become several documents, because then it
        is unknown which of them this is.
        """
        part = self._part_of(document)
        if examiner.cleaner is not None and examiner.cleaner.makes_documents:
            return ""
        row = int(document - self._starts()[part])
        records = (record for _, record in read_parts(self._parts()[part : part + 1], options))
        record = next(islice(records, row, None), b"")
        url, file_row = self.place(document)
        (made,) = examiner.examine_all([record], [Place(url, file_row)])
        return (made[0].text or "")[:SAMPLE_CHARS]

    def _parts(self) -> list[InputPart]:
        return [part for chunk in self.chunks for part in chunk.parts]

    def _part_of(self, document: int) -> int:
        return int(np.searchsorted(self._starts(), document, side="right")) - 1

    def _dropped_by_corpus_steps(self, options: ReadOptions, examiner: Examiner) -> Iterator[DropSample]:
        dropped = np.flatnonzero(self.examined & ~self.found.keep)
        verdicts = self.found.verdicts[dropped]
        for code in np.flatnonzero(np.bincount(verdicts)):  # `np.unique` would load masked arrays
            for document in dropped[verdicts == code][:SAMPLES_PER_REASON]:
                url, row = self.place(int(document))
                text = self._text(int(document), options, examiner)
                yield DropSample(self.found.reasons[code], url, row, self._near(int(document)), text)

    def _near(self, document: int) -> str:
        near = self.near.get(document)
        if near is None:
            return ""
        if near < 0:
            return "near a document of an earlier dataset"
        url, row = self.place(near)
        return f"near {url}, row {row}"

    def first_rows(self) -> NDArray[np.int64]:
        """Returns, for each part, the row in the file at which the part begins."""
        rows, url, row = np.zeros(len(self.counts), np.int64), None, 0
        for i, part in enumerate(part for chunk in self.chunks for part in chunk.parts):
            row = row if part.url == url else 0
            rows[i], url = row, part.url
            row += int(self.counts[i])
        return rows

    def kept_sources(self) -> Iterator[tuple[tuple[str, int], ...]]:
        """Yields, for each chunk, the file and row of each kept document."""
        first_rows, starts, first = self.first_rows(), self._starts(), 0
        for chunk in self.chunks:
            sources: list[tuple[str, int]] = []
            for i, part in enumerate(chunk.parts, first):
                kept = np.flatnonzero(self.found.keep[starts[i] : starts[i + 1]])
                sources.extend((part.url, int(first_rows[i] + row)) for row in kept)
            first += len(chunk.parts)
            yield tuple(sources)

    def _starts(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts, dtype=np.int64)])

    def _select(
        self, parts: tuple[InputPart, ...], start: np.int64, end: np.int64, keep: NDArray[np.bool_]
    ) -> Selection:
        return Selection(parts, keep[start:end].copy(), self.found.digests[start:end].tobytes())


def corpus_from(chunks: Sequence[InputChunk], surveys: Sequence[ChunkSurvey]) -> Corpus:
    """Returns the corpus that consists of the surveys of all chunks, in order."""
    table, verdicts = ReasonTable(), list[NDArray[np.uint8]]()
    for survey in surveys:
        codes = np.array([table.code(reason) for reason in survey.found.reasons], np.uint8)
        verdicts.append(codes[survey.found.verdicts])
    found = survey_from_bytes(
        b"".join(each.tobytes() for each in verdicts),
        b"".join(survey.found.digests.tobytes() for survey in surveys),
        tuple(table.reasons),
    )
    corpus = Corpus(tuple(chunks), np.concatenate([np.zeros(0, np.int64), *(s.counts for s in surveys)]), found)
    corpus.samples = tuple(_samples_of(corpus, surveys))
    return corpus


def _samples_of(corpus: Corpus, surveys: Sequence[ChunkSurvey]) -> Iterator[DropSample]:
    """Yields the samples of all chunks; their rows now count from the start of the file."""
    first_rows, first_part, taken = corpus.first_rows(), 0, Counter[str]()
    for chunk, survey in zip(corpus.chunks, surveys, strict=True):
        rows: dict[str, int] = {}
        for i, part in enumerate(chunk.parts, first_part):
            rows.setdefault(part.url, int(first_rows[i]))
        for sample in survey.samples:
            taken[sample.reason] += 1
            if taken[sample.reason] <= SAMPLES_PER_REASON:
                yield DropSample(sample.reason, sample.file, rows[sample.file] + sample.row, sample.detail, sample.text)
        first_part += len(chunk.parts)
