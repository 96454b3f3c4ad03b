"""Finds documents that share an n-gram of words with an evaluation set (Brown et al. 2020, arXiv 2005.14165,
appendix C)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytide.core.errors import DataError
from raytide.core.io.storage import read_bytes
from raytide.core.specs.cleaning import Decontamination
from raytide.pipelines.cleaning.corpus.hashing import hash_n_grams, hash_words


@dataclass(frozen=True, slots=True)
class EvaluationSets:
    """The n-grams of words of all evaluation sets, as sorted 64-bit hashes. Case and punctuation are ignored."""

    n: int
    n_grams: NDArray[np.uint64]

    @staticmethod
    def read(spec: Decontamination) -> EvaluationSets:
        """Reads the evaluation sets. Raises DataError for a set whose texts are all shorter than one n-gram, because
        such a set would have no effect.
        """
        found = [np.zeros(0, np.uint64)]
        for url in spec.sets:
            n_grams = _n_grams([text.encode() for text in _texts(url)], spec.n_gram)
            if len(n_grams) == 0:
                raise DataError(
                    f"evaluation set {url} has no text of {spec.n_gram} words.",
                    hint="Check the file, or lower decontaminate.n_gram.",
                )
            found.append(n_grams)
        return EvaluationSets(spec.n_gram, np.unique(np.concatenate(found)))

    def overlap(self, text: str) -> int:
        """Returns how many n-grams of the text occur in at least one evaluation set."""
        own = _n_grams([text.encode()], self.n)
        at = np.minimum(np.searchsorted(self.n_grams, own), len(self.n_grams) - 1)
        return int(np.count_nonzero(self.n_grams[at] == own))


def _n_grams(documents: list[bytes], n: int) -> NDArray[np.uint64]:
    words = hash_words(documents)
    n_grams, counts = hash_n_grams(words.hashes, words.lengths, n)
    return n_grams[np.repeat(words.lengths >= n, counts)]


def _texts(url: str) -> Iterator[str]:
    """Yields the texts of a file: every text in each row of JSONL; of another file, its whole content."""
    try:
        content = read_bytes(url).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"evaluation set {url} is not UTF-8: {error}.", hint="Convert it.") from None
    if not url.endswith((".jsonl", ".json")):
        yield content
        return
    for number, line in enumerate(content.split("\n") if url.endswith(".jsonl") else [content]):
        try:
            yield from _strings(json.loads(line)) if line.strip() else ()
        except (ValueError, RecursionError) as error:
            raise DataError(f"evaluation set {url}, row {number} is not JSON: {error}.", hint="Correct it.") from None


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
