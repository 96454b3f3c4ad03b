"""Fingerprints of documents: their signatures and word hashes. Steps over the whole corpus need these, but no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytide.core.specs.cleaning import CleaningSpec
from raytide.pipelines.cleaning.corpus.hashing import hash_words
from raytide.pipelines.cleaning.corpus.minhash import Signatures, sign


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Fingerprints of the documents that the rules kept, in order. A field is None if no step needs it."""

    signatures: Signatures | None = None
    words: NDArray[np.uint32] | None = None
    """The low half of each word's hash."""
    lengths: NDArray[np.int64] | None = None
    """The number of words of each document."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the fingerprints as named arrays. `from_arrays` is the inverse."""
        found: dict[str, np.ndarray] = {}
        if self.signatures is not None:
            bands, slots = self.signatures.bands, self.signatures.slots
            found |= {"bands": bands, "slots": slots, "widths": np.array([bands.shape[1], slots.shape[1]])}
        if self.words is not None and self.lengths is not None:
            found |= {"words": self.words, "word_counts": self.lengths}
        return found

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Fingerprints:
        signatures = None
        if "bands" in arrays:
            bands, slots = arrays["widths"].tolist()
            signatures = Signatures(arrays["slots"].reshape(-1, slots), arrays["bands"].reshape(-1, bands))
        return cls(signatures, arrays.get("words"), arrays.get("word_counts"))


def fingerprint(texts: Sequence[str], spec: CleaningSpec | None) -> Fingerprints:
    """Returns the fingerprints of the texts. Only fields that the spec's steps need are computed."""
    if spec is None or (spec.near_duplicates is None and spec.substrings is None):
        return Fingerprints()
    words = hash_words([text.encode() for text in texts])
    signatures = None if spec.near_duplicates is None else sign(words.hashes, words.lengths, spec.near_duplicates)
    if spec.substrings is None:
        return Fingerprints(signatures)
    return Fingerprints(signatures, words.hashes.astype(np.uint32), words.lengths)
