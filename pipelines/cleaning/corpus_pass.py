"""The driver's part of cleaning, over the whole corpus: near-duplicates, earlier datasets and repeated substrings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from raytide.core.errors import ConfigError, DataError
from raytide.core.io.storage import join, read_bytes, sha256, write_bytes
from raytide.core.io.token_dataset import DatasetFile, load_manifest
from raytide.core.specs.cleaning import CleaningSpec, NearDuplicates
from raytide.pipelines.chunk_store import AlteredError, pack_blob, unpack_blob
from raytide.pipelines.cleaning.corpus.minhash import Signatures
from raytide.pipelines.cleaning.corpus.near_duplicates import SignatureStore, cluster, slots_of
from raytide.pipelines.cleaning.corpus.substrings import Cuts, repeated_words
from raytide.pipelines.cleaning.fingerprints import Fingerprints
from raytide.pipelines.cleaning.report import REPORT, SIGNATURES, CleaningCounts

NEAR, NEAR_EARLIER, REPEATED = "near_duplicate", "near_earlier_dataset", "repeated_substrings"


@dataclass(slots=True)
class CorpusCleaning:
    """Collects the fingerprints of chunks, in any order. All documents are compared after the last chunk has been
    added.
    """

    spec: CleaningSpec
    counts: list[CleaningCounts] = field(default_factory=list)
    clusters: int = 0
    largest: int = 0
    _chunks: dict[int, Fingerprints] = field(default_factory=dict)
    _store: SignatureStore | None = None
    _order: dict[int, int] = field(default_factory=dict)
    _kept: Signatures | None = None

    def add(self, index: int, fingerprints: Fingerprints, counts: CleaningCounts) -> None:
        """Adds a chunk's fingerprints and counts.

        Memory use is 8 bytes for each band of a document. If a step needs word hashes, it is 4 more bytes for each
        word. The slots of the MinHash signatures go to a temporary file.
        """
        self.counts.append(counts)
        if (near := self.spec.near_duplicates) is not None and (signatures := fingerprints.signatures) is not None:
            self._store = self._store or SignatureStore(near.bands * near.rows)
            self._order[index] = self._store.add(signatures)
        self._chunks[index] = replace(fingerprints, signatures=None)

    def close(self) -> None:
        """Removes the temporary file of signatures."""
        if self._store is not None:
            self._store.close()

    def near_duplicates(self, kept: NDArray[np.bool_]) -> dict[int, int]:
        """Returns the near-duplicates to drop. Each of them is mapped to the document that it duplicates, or to -1 if
        that document is in an earlier dataset.

        Document i is the i-th document that the rules kept, counted from 0. `kept[i]` is False if another step has
        dropped document i since then.
        """
        near = self.spec.near_duplicates
        if near is None or self._store is None:
            return {}
        own = self._store.signatures([self._order[index] for index in sorted(self._order)])
        earlier = [read_signatures(url, near) for url in near.against]
        before = sum(len(each.bands) for each in earlier)
        first = cluster([*earlier, own], near.min_similarity).first[before:] - before
        is_dropped = kept & (first != np.arange(len(first)))
        standing = np.flatnonzero(kept & ~is_dropped)
        self._kept = Signatures(slots_of(own, standing), own.bands[standing])
        sizes = np.unique(first[kept & (first >= 0)], return_counts=True)[1]
        self.clusters, self.largest = int(np.count_nonzero(sizes > 1)), int(sizes.max(initial=0))
        return {int(i): max(int(first[i]), -1) for i in np.flatnonzero(is_dropped)}

    def repeats(self, kept: NDArray[np.bool_]) -> tuple[dict[int, Cuts], NDArray[np.int64]]:
        """Returns the repeated words to cut from each chunk, and the documents that consist only of repeated words."""
        rule = self.spec.substrings
        order = sorted(self._chunks)
        lengths = [each for i in order if (each := self._chunks[i].lengths) is not None]
        words = [own for i in order if (own := self._chunks[i].words) is not None]
        if rule is None or not words:
            return {}, np.zeros(0, np.int64)
        counts = np.concatenate(lengths)
        standing = np.repeat(kept, counts)
        marks = np.zeros(len(standing), np.bool_)
        ids = np.concatenate(words)[standing].astype(np.uint64)
        marks[standing] = repeated_words(ids, counts[kept], rule.min_words)
        return _cuts_by_chunk(marks, order, lengths)

    def write(self, out: str) -> tuple[DatasetFile, DatasetFile | None]:
        """Writes the cleaning report. Also writes the signatures of the kept documents if signatures were computed."""
        report = CleaningCounts.total(self.counts).report()
        counted = {"near_duplicate_clusters": self.clusters, "largest_cluster": self.largest}
        body = report.model_copy(update=counted).to_bytes()
        write_bytes(join(out, REPORT), body)
        written = DatasetFile(file=REPORT, sha256=sha256(body))
        near = self.spec.near_duplicates
        if near is None or self._kept is None:
            return written, None
        blob = pack_blob({"bands": self._kept.bands, "slots": self._kept.slots}, _form(near))
        write_bytes(join(out, SIGNATURES), blob)
        return written, DatasetFile(file=SIGNATURES, sha256=sha256(blob))


def read_signatures(dataset: str, near: NearDuplicates) -> Signatures:
    """Returns the signatures of a dataset.

    Raises ConfigError if the dataset has no signatures, or if they were computed with other settings than `near`.
    Raises DataError if the signatures were altered.
    """
    where = join(dataset, _signatures_of(dataset).file)
    try:
        arrays, about = unpack_blob(read_bytes(where), where)
    except AlteredError:
        raise DataError(f"{where} was altered.", hint="Build that dataset again.") from None
    if about != _form(near):
        raise ConfigError(
            f"near_duplicates.against: the signatures of {dataset} are of {json.dumps(about)}, "
            f"not of {json.dumps(_form(near))}.",
            hint="Use the same bands, rows, n_gram and seed.",
        )
    slots = arrays["slots"].reshape(-1, near.bands * near.rows)
    return Signatures(slots, arrays["bands"].reshape(-1, near.bands))


def against_identity(spec: CleaningSpec) -> list[tuple[str, int, str]]:
    """Returns (name, size, version) of each dataset with which the corpus is compared. Raises the errors of
    `read_signatures`.
    """
    datasets = () if spec.near_duplicates is None else spec.near_duplicates.against
    return [(f"against {url}", 0, _signatures_of(url).sha256) for url in datasets]


def _signatures_of(dataset: str) -> DatasetFile:
    found = load_manifest(dataset).source.signatures
    if found is None:
        raise ConfigError(
            f"near_duplicates.against: {dataset} holds no signatures.",
            hint="Build it with cleaning.near_duplicates.",
        )
    return found


def _form(near: NearDuplicates) -> dict[str, object]:
    return {"bands": near.bands, "rows": near.rows, "n_gram": near.n_gram, "seed": near.seed}


def _cuts_by_chunk(
    marks: NDArray[np.bool_], order: list[int], lengths: list[NDArray[np.int64]]
) -> tuple[dict[int, Cuts], NDArray[np.int64]]:
    cuts: dict[int, Cuts] = {}
    empty, at, first = list[int](), 0, 0
    for index, counts in zip(order, lengths, strict=True):
        for i, count in enumerate(counts.tolist()):
            own = marks[at : at + count]
            at += count
            if count and own.all():
                empty.append(first + i)
            elif own.any():
                cuts.setdefault(index, {})[i] = own.copy()
        first += len(counts)
    return cuts, np.array(empty, np.int64)
