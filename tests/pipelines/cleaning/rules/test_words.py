import pytest
from tests.pipelines.cleaning.rules import reference

from raytide.pipelines.cleaning.rules.words import SYMBOLS, count_sentences, repeated, split_words

TEXTS = ["", "It's two words.", "a... b", "x1_y z’s ''", "größe 東京 ٣ ½", "«Ja», said—he… #1", "a.b.c 3.14"]


@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_a_plain_scanner(text: str) -> None:
    assert split_words(text) == reference.words(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One. Two", 2),
        ("One.", 1),
        ("One?! Two.", 2),
        ("Say... more", 1),
        ('"A." "B."', 2),
        ("?", 1),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count == reference.sentences(text)


def test_symbols_are_the_published_ones() -> None:
    assert reference.SYMBOLS <= SYMBOLS
    assert not SYMBOLS & set("azAZ09éß東 \n\t•")


def test_repeated_counts_elements_after_their_first() -> None:
    assert repeated(["ab", "c", "ab", "ab"]) == (2, 4)
