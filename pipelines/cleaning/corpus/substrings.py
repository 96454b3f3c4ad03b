"""Finds repeated runs of words across documents (Lee et al. 2021, arXiv 2107.06499).

Rolling hashes find candidates, which are verified word by word.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raytide.pipelines.cleaning.corpus.hashing import hash_n_grams, hash_words

Cuts = dict[int, NDArray[np.bool_]]
"""A mask of the words to cut out of each document of a chunk, by the document's index among those that the rules kept.
"""
COMPARED = 1 << 16
"""The number of windows that are compared at once."""


def repeated_words(ids: NDArray[np.uint64], lengths: NDArray[np.int64], min_words: int) -> NDArray[np.bool_]:
    """Returns a mask of repeated words. A word is repeated if it is in a run of at least `min_words` words that
    occurred earlier.

    The earlier run may be in an earlier document or in the same one. `ids` contains the words of all documents, and
    `lengths` contains the number of words in each document. A run never crosses a document's end. The function needs
    about 40 bytes of memory per word.
    """
    is_repeat = np.zeros(len(ids), np.bool_)
    is_long = lengths >= min_words
    if not is_long.any():
        return is_repeat
    hashes, counts = hash_n_grams(ids, lengths, min_words)
    hashes = hashes[np.repeat(is_long, counts)]
    starts = _window_starts(lengths, min_words)
    windows = _verified(ids, starts, _earlier(hashes), min_words)
    edges = np.zeros(len(ids) + 1, np.int32)
    np.add.at(edges, windows, 1)
    np.add.at(edges, windows + min_words, -1)
    is_repeat[:] = np.cumsum(edges[:-1]) > 0
    return is_repeat


def cut(text: bytes, is_repeat: NDArray[np.bool_], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> bytes:
    """Returns a document's UTF-8 without its repeated words. The text between adjacent repeated words is cut too."""
    if not is_repeat.any():
        return text
    edges = np.diff(np.concatenate([[False], is_repeat, [False]]).astype(np.int8))
    kept, at = [], 0
    for first, last in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        kept.append(text[at : starts[first]])
        at = int(ends[last - 1])
    return b"".join([*kept, text[at:]])


def cut_words(texts: list[str], cuts: Cuts) -> list[str]:
    """Returns the texts without repeated words. `cuts` maps a text's index to a mask of its repeated words."""
    result = list(texts)
    for i, is_repeat in cuts.items():
        text = texts[i].encode()
        words = hash_words([text])
        result[i] = cut(text, is_repeat, words.starts, words.ends).decode()
    return result


def _window_starts(lengths: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Returns the index of the first word of each window of n words, in the order of `hash_n_grams`."""
    counts = np.maximum(lengths - n + 1, 0)
    firsts = np.cumsum(lengths) - lengths
    ranks = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    starts: NDArray[np.int64] = np.repeat(firsts, counts) + ranks
    return starts


def _earlier(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns, for each window, the index of the first window with the same hash; its own index if there is no earlier
    one.
    """
    order = np.argsort(hashes, kind="stable")
    in_order = hashes[order]
    begins = np.concatenate([[True], in_order[1:] != in_order[:-1]])
    first = np.empty(len(hashes), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return first


def _verified(
    ids: NDArray[np.uint64], starts: NDArray[np.int64], first: NDArray[np.int64], n: int
) -> NDArray[np.int64]:
    """Returns the starts of windows whose words really equal those of the earlier window with the same hash."""
    later = np.flatnonzero(first < np.arange(len(first)))
    steps, found = np.arange(n), [np.zeros(0, np.int64)]
    for begin in range(0, len(later), COMPARED):
        some = later[begin : begin + COMPARED]
        own, other = starts[some, None] + steps, starts[first[some], None] + steps
        found.append(starts[some[(ids[own] == ids[other]).all(axis=1)]])
    return np.concatenate(found)
