"""Decides which documents a build keeps, with the reason for each dropped one. Pure functions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from raytide.core.specs.data import TextFilter

DIGEST_BYTES = 16


class FilterVerdict(IntEnum):
    """The verdict on a document, in one byte. Lower-case names are the reasons in the manifest."""

    KEPT = 0
    NO_TEXT = 1
    NOT_UTF8 = 2
    TOO_SHORT = 3
    TOO_LONG = 4
    LONG_LINE = 5
    DUPLICATE = 6


@dataclass(frozen=True, slots=True)
class Survey:
    """Verdicts and digests of documents: 17 bytes each, so a hundred million fit in a driver's memory."""

    verdicts: NDArray[np.uint8]
    digests: NDArray[np.void]
    """Digest of each document's bytes, DIGEST_BYTES long."""

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
        counts = np.bincount(self.verdicts, minlength=len(FilterVerdict))
        return {v.name.lower(): int(counts[v]) for v in FilterVerdict if v != FilterVerdict.KEPT and counts[v]}


def judge(document: bytes | None, rules: TextFilter) -> FilterVerdict:
    """Returns the first rule that the document violates, or KEPT. Duplicates are found by `drop_duplicates`."""
    if document is None:
        return FilterVerdict.NO_TEXT
    try:
        text = document.decode()
    except UnicodeDecodeError:
        return FilterVerdict.NOT_UTF8
    if len(text) < rules.min_chars:
        return FilterVerdict.TOO_SHORT
    if rules.max_chars is not None and len(text) > rules.max_chars:
        return FilterVerdict.TOO_LONG
    if rules.max_line_chars is not None and max(map(len, text.splitlines()), default=0) > rules.max_line_chars:
        return FilterVerdict.LONG_LINE
    return FilterVerdict.KEPT


def digest(document: bytes | None) -> bytes:
    return hashlib.blake2b(document or b"", digest_size=DIGEST_BYTES).digest()


def survey_of(documents: Iterable[bytes | None], rules: TextFilter) -> Survey:
    """Returns the verdict and the digest of each document."""
    listed = list(documents)
    return survey_from_bytes(
        bytes(judge(document, rules) for document in listed), b"".join(digest(document) for document in listed)
    )


def survey_from_bytes(verdicts: bytes, digests: bytes) -> Survey:
    return Survey(np.frombuffer(verdicts, np.uint8), np.frombuffer(digests, np.dtype((np.void, DIGEST_BYTES))))


def drop_duplicates(survey: Survey) -> Survey:
    """Keep only the first of kept documents with equal digests, in dataset order."""
    kept = np.flatnonzero(survey.keep)
    _, first = np.unique(survey.digests[kept], return_index=True)
    is_repeat = np.ones(len(kept), np.bool_)
    is_repeat[first] = False
    verdicts = survey.verdicts.copy()
    verdicts[kept[is_repeat]] = FilterVerdict.DUPLICATE
    return Survey(verdicts, survey.digests)


def describe(dropped: dict[str, int]) -> str:
    """Returns text like `3 too_short, 1 not_utf8`, most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in Counter(dropped).most_common())
