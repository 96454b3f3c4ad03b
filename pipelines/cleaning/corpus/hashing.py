"""Hashes of words and of n-grams, computed in numpy for whole batches of documents.

A word is either a run of ASCII letters, digits and underscores, or a single character that is not ASCII. ASCII
letters are converted to lower case. ASCII punctuation and space are ignored. The hashes do not depend on a
tokenizer, so datasets with different tokenizers can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BATCH_BYTES = 1 << 16
"""The bytes of text that are hashed at once: few enough that the arrays stay in the processor's cache."""
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_SHORT = 0xD6E8FEB86659FD93
_SPACE, _ASCII, _LEAD, _CONTINUED = range(4)


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a batch of documents, one document after the other."""

    hashes: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    """The number of words of each document."""
    starts: NDArray[np.int64]
    """The offset of each word's first byte in its document's UTF-8."""
    ends: NDArray[np.int64]


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns well-spread 64-bit hashes of integers (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def hash_words(documents: Sequence[bytes]) -> Words:
    """Returns the hashed words of documents in UTF-8."""
    parts: list[Words] = []
    batch: list[bytes] = []
    size = 0
    for document in documents:
        if batch and size + len(document) > BATCH_BYTES:
            parts.append(_hash_batch(batch))
            batch, size = [], 0
        batch.append(document)
        size += len(document) + 1
    parts.append(_hash_batch(batch))
    return Words(
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.ends for part in parts]),
    )


def hash_n_grams(
    ids: NDArray[np.uint64], lengths: NDArray[np.int64], n: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Returns the hashes of all documents' n-grams, and the number of n-grams of each document. A document of fewer
    than n words is one n-gram.
    """
    counts = np.where(lengths >= n, lengths - n + 1, np.minimum(lengths, 1))
    total = int(lengths.sum())
    padded = np.concatenate([ids, np.zeros(n, np.uint64)])
    hashes = padded[:total].copy()
    for k in range(1, n):
        hashes *= np.uint64(_BASE)
        hashes += padded[k : k + total]
    ends = np.cumsum(lengths)
    for i in np.flatnonzero((lengths < n) & (lengths > 0)):  # their windows reach into the next document
        value = int(lengths[i]) * _SHORT
        for each in ids[ends[i] - lengths[i] : ends[i]].tolist():
            value = (value * _BASE + each) % (1 << 64)
        hashes[ends[i] - lengths[i]] = value
    is_inside = np.ones(total, np.bool_)
    skipped = lengths - counts
    for i in np.flatnonzero(skipped):
        is_inside[ends[i] - skipped[i] : ends[i]] = False
    return mix(hashes[is_inside]), counts


def _hash_batch(documents: Sequence[bytes]) -> Words:
    text = np.frombuffer(b" ".join([b"", *documents, b""]), np.uint8)
    kinds = _KINDS[text]
    is_ascii, is_tail = kinds == _ASCII, kinds == _CONTINUED
    is_start = is_ascii.copy()
    is_start[1:] &= ~is_ascii[:-1]
    is_start |= kinds == _LEAD
    is_end = np.zeros(len(text), np.bool_)  # at a word's last byte
    is_end[:-1] = (is_ascii[:-1] & ~is_ascii[1:]) | ((kinds[:-1] >= _LEAD) & ~is_tail[1:])
    starts, ends = np.flatnonzero(is_start), np.flatnonzero(is_end)
    powers, inverses = _powers(len(text))
    sums = np.cumsum(_VALUES[text] * powers, dtype=np.uint64)
    hashes = mix((sums[ends] - sums[starts - 1]) * inverses[starts])
    offsets = np.cumsum([1, *(len(document) + 1 for document in documents)])
    firsts = np.searchsorted(starts, offsets)
    lengths = np.diff(firsts)
    shifts = np.repeat(offsets[:-1], lengths)
    return Words(hashes, lengths, starts - shifts, ends + 1 - shifts)


def _kinds() -> NDArray[np.uint8]:
    kinds = np.zeros(256, np.uint8)
    for byte in b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz":
        kinds[byte] = _ASCII
    kinds[0x80:0xC0] = _CONTINUED
    kinds[0xC0:] = _LEAD
    return kinds


def _values() -> NDArray[np.uint64]:
    """Returns a random number for each byte, the same for both cases of a letter."""
    folded = np.array([ord(chr(byte).lower()) if byte < 128 else byte for byte in range(256)], np.uint64)
    return mix((folded + np.uint64(1)) * np.uint64(_BASE))


_KINDS = _kinds()
_VALUES = _values()
_cache: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]] = []


def _powers(size: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns the powers of an odd number and of its inverse modulo 2^64. The longest arrays so far are cached."""
    found = _cache[0] if _cache else None
    if found is None or len(found[0]) < size:
        bases, inverses = np.full((2, max(size, BATCH_BYTES * 2)), 1, np.uint64)
        bases[1:], inverses[1:] = np.uint64(_BASE), np.uint64(_INVERSE)
        found = np.cumprod(bases, dtype=np.uint64), np.cumprod(inverses, dtype=np.uint64)
        _cache[:] = [found]  # threads may do this at once: each goes on with its own
    return found[0][:size], found[1][:size]
