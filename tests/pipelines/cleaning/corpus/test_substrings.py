import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raytide.pipelines.cleaning.corpus.hashing import hash_words
from raytide.pipelines.cleaning.corpus.substrings import cut, repeated_words

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=20), min_size=1, max_size=6)


def plain(rows: list[list[int]], n: int) -> list[bool]:
    """Marks the words of each window that occurred before, comparing all pairs."""
    seen: set[tuple[int, ...]] = set()
    marks = []
    for row in rows:
        own = [False] * len(row)
        for i in range(len(row) - n + 1):
            if (window := tuple(row[i : i + n])) in seen:
                own[i : i + n] = [True] * n
            seen.add(window)
        marks += own
    return marks


@settings(max_examples=300)
@given(ROWS, st.integers(1, 6))
def test_repeats_are_those_found_by_comparing_all_pairs(rows: list[list[int]], n: int) -> None:
    ids = np.array([each for row in rows for each in row], np.uint64)
    assert repeated_words(ids, np.array([len(row) for row in rows]), n).tolist() == plain(rows, n)


def test_a_repeated_passage_is_cut_out_of_the_later_document() -> None:
    passage = " ".join(f"word{i}" for i in range(50)) + "."
    texts = [f"First: {passage} End".encode(), f"“Größe” before, {passage.upper()} after!".encode(), b"other text"]
    words = hash_words(texts)
    marks = np.split(repeated_words(words.hashes, words.lengths, 50), np.cumsum(words.lengths)[:-1])
    starts = np.split(words.starts, np.cumsum(words.lengths)[:-1])
    ends = np.split(words.ends, np.cumsum(words.lengths)[:-1])
    found = [cut(*each) for each in zip(texts, marks, starts, ends, strict=True)]
    assert found == [texts[0], "“Größe” before, . after!".encode(), texts[2]]
