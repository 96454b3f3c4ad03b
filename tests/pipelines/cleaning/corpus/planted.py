"""Documents of integer ids with planted near-duplicates of known similarity."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIMILARITIES = (0.55, 0.65, 0.75, 0.85, 0.95)
N_GRAM = 5


@dataclass(frozen=True)
class Planted:
    ids: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    original: NDArray[np.int64]
    """The index of the document that each one copies; its own for the others."""
    similarity: NDArray[np.float64]
    """The true Jaccard similarity of a copy's 5-grams and its original's."""


def plant(documents: int, copies: int, seed: int, words: tuple[int, int] = (150, 600)) -> Planted:
    """Returns `documents` documents, the last `copies` of which are changed copies of others, each of another one."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 20_000, rng.integers(*words)) for _ in range(documents - copies)]
    chosen = rng.permutation(len(rows))[:copies]
    similarity = np.zeros(documents)
    for k, original in enumerate(chosen):
        copy = changed(rows[original], SIMILARITIES[k % len(SIMILARITIES)], rng)
        similarity[len(rows)] = jaccard(rows[original], copy)
        rows.append(copy)
    lengths = np.array([len(row) for row in rows])
    original = np.concatenate([np.arange(documents - copies), chosen])
    return Planted(np.concatenate(rows).astype(np.uint64), lengths, original, similarity)


def changed(row: NDArray[np.int64], similarity: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns a copy with words replaced, so that about that Jaccard similarity of 5-grams is left.

    A replaced word changes 5 n-grams: with a share x of them left, J = x / (2 - x).
    """
    left = 2 * similarity / (1 + similarity)
    share = 1 - left ** (1 / N_GRAM)
    copy = row.copy()
    at = rng.random(len(row)) < share
    copy[at] = rng.integers(20_000, 40_000, at.sum())
    return copy


def jaccard(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    left, right = n_grams(a), n_grams(b)
    return len(left & right) / len(left | right)


def n_grams(row: NDArray[np.int64]) -> set[tuple[int, ...]]:
    """A shorter row is one n-gram."""
    ids = row.tolist()
    return {tuple(ids[i : i + N_GRAM]) for i in range(max(1, len(ids) - N_GRAM + 1))}


def expected(similarity: NDArray[np.float64], bands: int = 14, rows: int = 8) -> NDArray[np.float64]:
    """Returns the probability of a shared band for each similarity (Leskovec et al., Mining of Massive Datasets)."""
    found: NDArray[np.float64] = 1 - (1 - similarity**rows) ** bands
    return found
