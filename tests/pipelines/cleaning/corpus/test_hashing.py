import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytide.pipelines.cleaning.corpus.hashing import hash_n_grams, hash_words

TEXTS = st.lists(st.text(alphabet="abC_1 \n.,éß東€😀", max_size=40), min_size=1, max_size=6)


def plain(text: str) -> list[str]:
    return [word.lower() if word.isascii() else word for word in re.findall(r"[0-9A-Za-z_]+|[^\x00-\x7f]", text)]


@given(TEXTS)
def test_words_and_their_places_are_those_of_a_regular_expression(texts: list[str]) -> None:
    words = hash_words([text.encode() for text in texts])
    expected = [plain(text) for text in texts]
    assert words.lengths.tolist() == [len(each) for each in expected]
    at = 0
    by_hash: dict[int, str] = {}
    for text, plain_words in zip(texts, expected, strict=True):
        for word in plain_words:
            found = text.encode()[words.starts[at] : words.ends[at]].decode()
            assert (found.lower() if found.isascii() else found) == word
            assert by_hash.setdefault(int(words.hashes[at]), word) == word
            at += 1
    assert len(by_hash) == len({word for each in expected for word in each})


@given(TEXTS)
def test_a_batch_gives_the_hashes_of_each_document_alone(texts: list[str]) -> None:
    together = hash_words([text.encode() for text in texts])
    alone = [hash_words([text.encode()]).hashes for text in texts]
    assert together.hashes.tolist() == np.concatenate(alone).tolist()


def test_a_document_longer_than_a_batch_is_hashed_whole() -> None:
    words = hash_words([b"word " * 200_000, b"word"])
    assert words.lengths.tolist() == [200_000, 1]
    assert len(np.unique(words.hashes)) == 1


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=6), st.integers(1, 5))
def test_n_grams_are_equal_where_their_words_are(rows: list[list[int]], n: int) -> None:
    ids = np.array([each for row in rows for each in row], np.uint64)
    hashes, counts = hash_n_grams(ids, np.array([len(row) for row in rows]), n)
    expected = [tuple(row[i : i + n]) for row in rows for i in range(max(len(row) - n + 1, min(len(row), 1)))]
    assert counts.tolist() == [max(len(row) - n + 1, min(len(row), 1)) for row in rows]
    assert len(hashes) == len(expected)
    assert len(set(zip(hashes.tolist(), expected, strict=True))) == len(set(expected)) == len(set(hashes.tolist()))
