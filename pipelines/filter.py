"""Decides which documents a build keeps, and the reason for each dropped document. The functions are pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from raytide.core.specs.data import TextFilter
from raytide.pipelines.cleaning.cleaner import Cleaned, Cleaner
from raytide.pipelines.cleaning.stages import Place
from raytide.pipelines.readers.base import Drop, Record

DIGEST_BYTES = 16
MOST_REASONS = 255
"""The most reasons of a survey, since a verdict takes one byte."""


class FilterVerdict(IntEnum):
    """The verdict on a document, in one byte. The manifest uses its name, in lower case, as the reason of a drop."""

    KEPT = 0
    NO_TEXT = 1
    NOT_UTF8 = 2
    TOO_SHORT = 3
    TOO_LONG = 4
    LONG_LINE = 5
    DUPLICATE = 6

    @property
    def reason(self) -> str:
        return self.name.lower()


REASONS = tuple(verdict.reason for verdict in FilterVerdict)
"""The reasons of this module. A survey appends those of readers and cleaning, in an order of its own."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The verdict and the digest of each document. It takes 17 bytes per document, so the survey of a hundred million
    documents fits in a driver's memory.
    """

    verdicts: NDArray[np.uint8]
    """The index in `reasons` of each document's verdict."""
    digests: NDArray[np.void]
    """Digest of each document's bytes, DIGEST_BYTES long."""
    reasons: tuple[str, ...] = REASONS

    @property
    def documents(self) -> int:
        return len(self.verdicts)

    @property
    def keep(self) -> NDArray[np.bool_]:
        return np.equal(self.verdicts, FilterVerdict.KEPT)

    @property
    def kept(self) -> int:
        return int(np.count_nonzero(self.keep))

    def dropped(self) -> dict[str, int]:
        """Returns the number of dropped documents by reason."""
        counts = np.bincount(self.verdicts, minlength=len(self.reasons))
        return {reason: int(counts[i]) for i, reason in enumerate(self.reasons) if i and counts[i]}

    def drop(self, documents: NDArray[np.int64], reason: str) -> Survey:
        """Returns the survey with these documents marked as dropped. Steps that look at the whole corpus use this
        method to drop documents.
        """
        reasons = self.reasons if reason in self.reasons else (*self.reasons, reason)
        verdicts = self.verdicts.copy()
        verdicts[documents] = reasons.index(reason)
        return Survey(verdicts, self.digests, reasons)


@dataclass(slots=True)
class ReasonTable:
    """A table that numbers reasons. Each new reason gets the next number."""

    reasons: list[str] = field(default_factory=lambda: list(REASONS))

    def code(self, reason: str) -> int:
        try:
            return self.reasons.index(reason)
        except ValueError:
            if len(self.reasons) > MOST_REASONS:
                raise ValueError(f"over {MOST_REASONS} reasons to drop a document") from None
        self.reasons.append(reason)
        return len(self.reasons) - 1


@dataclass(slots=True)
class Examined:
    """The result of examining one document alone: its text, or the reason for dropping it."""

    text: str | None
    reason: str = REASONS[FilterVerdict.KEPT]
    detail: str = ""
    cleaned: Cleaned | None = None
    """The result of cleaning, if the document came that far."""

    def digest(self, record: Record) -> bytes:
        """Returns the digest by which duplicates and changed inputs are detected.

        This is the digest of the cleaned text if the document was cleaned, else the digest of the record.
        """
        return digest(record if self.cleaned is None else self.cleaned.text.encode())


@dataclass(frozen=True, slots=True)
class Examiner:
    """The steps that examine each document alone, in order: the filter, then cleaning."""

    rules: TextFilter
    cleaner: Cleaner | None = None

    def examine(self, record: Record) -> Examined:
        """Applies the filter to a record, without cleaning."""
        if isinstance(record, Drop):
            return Examined(None, record.reason, record.detail)
        try:
            text = record.decode()
        except UnicodeDecodeError as error:
            return Examined(None, FilterVerdict.NOT_UTF8.reason, str(error))
        verdict = judge_text(text, self.rules)
        if verdict != FilterVerdict.KEPT:
            return Examined(None, verdict.reason)
        return Examined(text)

    def examine_all(self, records: Sequence[Record], places: Sequence[Place]) -> Iterator[list[Examined]]:
        """Applies the filter and cleaning to records. Yields one list for each record. The list contains one document,
        or all documents that a user's stage made from the record.
        """
        filtered = [self.examine(record) for record in records]
        if self.cleaner is None:
            yield from ([each] for each in filtered)
            return
        passed = [i for i, each in enumerate(filtered) if each.text is not None]
        cleaned = iter(self.cleaner.clean_all([filtered[i].text or "" for i in passed], [places[i] for i in passed]))
        for each in filtered:
            if each.text is None:
                yield [each]
            else:
                yield [
                    Examined(c.text, cleaned=c) if c.reason is None else Examined(None, c.reason, cleaned=c)
                    for c in next(cleaned)
                ]


def judge_text(text: str, rules: TextFilter) -> FilterVerdict:
    """Returns the first filter rule that the text violates, or KEPT."""
    if len(text) < rules.min_chars:
        return FilterVerdict.TOO_SHORT
    if rules.max_chars is not None and len(text) > rules.max_chars:
        return FilterVerdict.TOO_LONG
    if rules.max_line_chars is not None and max(map(len, text.splitlines()), default=0) > rules.max_line_chars:
        return FilterVerdict.LONG_LINE
    return FilterVerdict.KEPT


def digest(record: Record | None) -> bytes:
    return hashlib.sha256(record if isinstance(record, bytes) else b"").digest()[:DIGEST_BYTES]


def survey_from_bytes(verdicts: bytes, digests: bytes, reasons: tuple[str, ...] = REASONS) -> Survey:
    return Survey(np.frombuffer(verdicts, np.uint8), np.frombuffer(digests, np.dtype((np.void, DIGEST_BYTES))), reasons)


def drop_duplicates(survey: Survey) -> Survey:
    """Returns the survey without duplicates: among kept documents with equal digests, only the first stays."""
    kept = np.flatnonzero(survey.keep)
    _, first = np.unique(survey.digests[kept], return_index=True)
    is_repeat = np.ones(len(kept), np.bool_)
    is_repeat[first] = False
    return survey.drop(kept[is_repeat], FilterVerdict.DUPLICATE.reason)


def describe(dropped: dict[str, int]) -> str:
    """Returns the counts as text like `3 too_short, 1 not_utf8`, the most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in Counter(dropped).most_common())
