"""Lookups find what a search of the whole text finds."""

from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.engine.scheduler.speculation.suffix_index import (
    MAX_MATCH,
    MIN_MATCH,
    SEPARATOR,
    Match,
    SuffixIndex,
)

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def length_at(tokens: list[int], text: list[int], at: int, start: int) -> int:
    length = 0
    while length < min(MAX_MATCH, at - start, len(text)) and tokens[at - 1 - length] == text[-1 - length]:
        length += 1
    return length


@given(tokens=TEXTS, start=st.integers(0, 10), parts=st.integers(1, 5))
def test_a_text_is_matched_with_its_own_longest_repetition(tokens: list[int], start: int, parts: int) -> None:
    growing: list[int] = []
    index = SuffixIndex(growing, min(start, len(tokens)))
    for at in range(0, len(tokens), parts):
        growing += tokens[at : at + parts]
        index.extend()
    found = index.find(growing)
    start = min(start, len(tokens))
    ends = range(start + MIN_MATCH, len(tokens))
    lengths = {at: length_at(tokens, tokens, at, start) for at in ends}
    matches = [at for at, length in lengths.items() if length >= MIN_MATCH]
    tried = matches[-16:]
    if found is None:
        assert not matches
        return
    longest = max(lengths[at] for at in tried)
    assert found.length == lengths[found.at]
    assert found.length == longest or found.length >= 32
    assert found.at == max(at for at in tried if lengths[at] == found.length)


@given(tokens=TEXTS, count=st.integers(0, 20))
def test_a_draft_continues_a_repetition_for_ever(tokens: list[int], count: int) -> None:
    index = SuffixIndex(tokens)
    index.extend()
    match = index.find(tokens)
    if match is not None:
        period, text = len(tokens) - match.at, list(tokens)
        for _ in range(count):
            text.append(text[-period])
        assert match.draft(count) == text[len(tokens) :]


def test_a_match_follows_its_text_until_that_differs() -> None:
    match = Match([1, 2, 3, 4, 5], 3, 3)
    assert match.follow(4)
    assert (match.at, match.length) == (4, 4)
    assert not match.follow(6)


def test_no_draft_goes_from_one_text_into_the_next() -> None:
    match = Match([1, 2, 3, 4, SEPARATOR, 7, 8], 3, 3)
    assert match.draft(4) == [4]
    assert match.follow(4)
    assert match.draft(4) == []
    assert not match.follow(9)
