"""The first pass over a corpus: judges every document before anything is written or learned.

The second pass (`encode`) reads documents again. Text is never kept, so a corpus may be larger than the cluster's
memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raytide.core.errors import DataError
from raytide.core.specs.data import TextFilter
from raytide.pipelines.filter import Survey, drop_duplicates, survey_from_bytes, survey_of
from raytide.pipelines.read import InputChunk, InputPart, read_documents
from raytide.pipelines.runner import Runner, batch_tasks

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Selection:
    """Parts, and a mask of the selected documents in them."""

    parts: tuple[InputPart, ...]
    keep: NDArray[np.bool_]
    digests: NDArray[np.void]
    """Digests of all documents of the parts, to detect changes since the survey."""

    def read(self, text_column: str) -> list[str]:
        """Returns the selected documents. DataError if an input was changed since the survey."""
        found = [document for part in read_documents(self.parts, text_column) for document in part]
        if survey_of(found, TextFilter()).digests.tobytes() != self.digests.tobytes():
            where = (
                self.parts[0].url
                if len(self.parts) == 1
                else f"{self.parts[0].url} or one of the {len(self.parts) - 1} files after it"
            )
            raise DataError(
                f"{where} was changed during the build.", hint="Build again once the inputs no longer change."
            )
        return [
            document.decode() for document, keep in zip(found, self.keep, strict=True) if keep and document is not None
        ]


@dataclass(frozen=True, slots=True)
class Corpus:
    """A surveyed corpus: `found` covers all documents in order, `counts` has the number of documents of each part."""

    chunks: tuple[InputChunk, ...]
    counts: NDArray[np.int64]
    found: Survey

    def selections(self) -> list[Selection]:
        """Returns, for each chunk, a selection of its kept documents."""
        starts, first, selections = self._starts(), 0, []
        for chunk in self.chunks:
            last = first + len(chunk.parts)
            selections.append(self._select(chunk.parts, starts[first], starts[last]))
            first = last
        return selections

    def sample(self, documents: int, seed: int) -> list[Selection]:
        """Returns about `documents` kept documents, from parts in random order, so that few row groups are read."""
        parts = [part for chunk in self.chunks for part in chunk.parts]
        starts, left, selections = self._starts(), documents, {}
        for i in random.Random(seed).sample(range(len(parts)), len(parts)):
            selection = self._select((parts[i],), starts[i], starts[i + 1])
            if (kept := int(np.count_nonzero(selection.keep))) == 0:
                continue
            selection.keep[np.flatnonzero(selection.keep)[left:]] = False
            selections[i] = selection
            left -= kept
            if left <= 0:
                break
        return [selections[i] for i in sorted(selections)]

    def _starts(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts, dtype=np.int64)])

    def _select(self, parts: tuple[InputPart, ...], start: np.int64, end: np.int64) -> Selection:
        return Selection(parts, self.found.keep[start:end].copy(), self.found.digests[start:end])


def survey_corpus(
    runner: Runner,
    chunks: Sequence[InputChunk],
    rules: TextFilter,
    text_column: str,
    on_documents: Callable[[int], None],
) -> Corpus:
    """Judge every document of `chunks` on the cluster. Duplicates are found here, once all digests are known."""
    counts, verdicts, digests = [np.zeros(0, np.int64)], [], []
    for table in runner.map_in_order(chunks, _survey_chunk, rules=rules, text_column=text_column):
        for row in table.to_pylist():
            counts.append(np.frombuffer(row["counts"], np.int64))
            verdicts.append(row["verdicts"])
            digests.append(row["digests"])
            on_documents(len(row["verdicts"]))
    found = survey_from_bytes(b"".join(verdicts), b"".join(digests))
    return Corpus(tuple(chunks), np.concatenate(counts), drop_duplicates(found) if rules.dedup else found)


def _survey_chunk(batch: pa.Table, rules: TextFilter, text_column: str) -> Iterator[pa.Table]:
    import pyarrow as pa

    for chunk in batch_tasks(batch):
        parts = read_documents(chunk.parts, text_column)
        found = survey_of((document for part in parts for document in part), rules)
        yield pa.table(
            {
                "counts": pa.array([np.array([len(part) for part in parts], np.int64).tobytes()], pa.large_binary()),
                "verdicts": pa.array([found.verdicts.tobytes()], pa.large_binary()),
                "digests": pa.array([found.digests.tobytes()], pa.large_binary()),
            }
        )
