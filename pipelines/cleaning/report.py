"""The report of cleaning, which is stored in the dataset.

Workers count the effects of cleaning on the documents that they read, and the driver adds the counts up.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import Field, ValidationError

from raytide.core.config import Config
from raytide.core.errors import DataError

REPORT = "cleaning.json"
"""The report's name in a dataset."""
SIGNATURES = "signatures.bin"
"""The name, in a dataset, of the file with the signatures of the kept documents."""
SIZES = 40
"""The number of buckets of lengths: bucket i counts texts of 2^(i-1) to 2^i - 1 characters, bucket 0 the empty ones."""


class CleaningReport(Config):
    """The content of `cleaning.json`. The counts of dropped documents by reason are in the manifest instead."""

    kept_lengths: tuple[int, ...] = Field(default=(0,) * SIZES, min_length=SIZES, max_length=SIZES)
    dropped_lengths: tuple[int, ...] = Field(default=(0,) * SIZES, min_length=SIZES, max_length=SIZES)
    languages: dict[str, int] = Field(default_factory=dict, max_length=500)
    """The number of documents by language, as far as the rules detect it."""
    changes: dict[str, int] = Field(default_factory=dict, max_length=500)
    """Replaced matches and removed headers, by kind."""
    near_duplicate_clusters: int = Field(default=0, ge=0)
    largest_cluster: int = Field(default=0, ge=0)
    """The number of documents in the largest cluster of near-duplicates, including the kept one."""

    def to_bytes(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> CleaningReport:
        """Parses a report from a file's bytes. Raises DataError if it is malformed."""
        try:
            return cls.model_validate(json.loads(content))
        except (ValueError, ValidationError, RecursionError) as error:
            raise DataError(f"{where} is malformed: {str(error)[:500]}.", hint="Build the dataset again.") from None


@dataclass(slots=True)
class CleaningCounts:
    """Counts of the effects of cleaning on a set of documents. `total` adds the counts of several sets."""

    kept: Counter[int] = field(default_factory=Counter)
    """Documents by bucket of length."""
    dropped: Counter[int] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)

    def add(self, chars: int, *, is_kept: bool, language: str | None, changes: Mapping[str, int]) -> None:
        (self.kept if is_kept else self.dropped)[min(chars.bit_length(), SIZES - 1)] += 1
        if language is not None:
            self.languages[language] += 1
        self.changes.update(changes)

    def to_json(self) -> list[list[tuple[str, int]]]:
        return [
            sorted((str(key), count) for key, count in counter.items())
            for counter in (self.kept, self.dropped, self.languages, self.changes)
        ]

    @classmethod
    def from_json(cls, body: Iterable[Iterable[tuple[str, int]]]) -> CleaningCounts:
        kept, dropped, languages, changes = (dict(each) for each in body)
        by_size = [Counter({int(size): count for size, count in each.items()}) for each in (kept, dropped)]
        return cls(by_size[0], by_size[1], Counter(languages), Counter(changes))

    @classmethod
    def total(cls, counts: Iterable[CleaningCounts]) -> CleaningCounts:
        result = cls()
        for each in counts:
            result.kept.update(each.kept)
            result.dropped.update(each.dropped)
            result.languages.update(each.languages)
            result.changes.update(each.changes)
        return result

    def report(self) -> CleaningReport:
        return CleaningReport(
            kept_lengths=tuple(self.kept[size] for size in range(SIZES)),
            dropped_lengths=tuple(self.dropped[size] for size in range(SIZES)),
            languages=dict(sorted(self.languages.items())),
            changes=dict(sorted(self.changes.items())),
        )
