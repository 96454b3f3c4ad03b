"""The rules decide as their published references do, on 500 documents made for each, on both sides of each bound."""

import random
from collections import Counter

import pytest
from tests.pipelines.cleaning.rules import reference

from raytide.core.specs.cleaning import C4Rules, CodeRules, FineWebRules, GopherRepetitionRules, GopherRules
from raytide.pipelines.cleaning.rules.code import code_quality
from raytide.pipelines.cleaning.rules.gopher import gopher_quality, gopher_repetition
from raytide.pipelines.cleaning.rules.web import c4_quality, fineweb_quality

DOCUMENTS = 500
COMMON = [
    "the",
    "river",
    "runs",
    "along",
    "old",
    "walls",
    "and",
    "that",
    "valley",
    "have",
    "many",
    "quiet",
    "farms",
    "with",
    "stone",
    "barns",
    "near",
    "to",
    "it",
]
STOPS = {"the", "be", "to", "of", "and", "that", "have", "with"}


def sentence(random: random.Random, words: int, end: str = ".") -> str:
    chosen = [random.choice(COMMON) if random.random() < 0.5 else fresh(random, 2, 9) for _ in range(words)]
    return " ".join(chosen).capitalize() + end


def fresh(random: random.Random, least: int, most: int) -> str:
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyzé", k=random.randint(least, most)))


def near(random: random.Random, share: float, count: int) -> int:
    """A number of `count` things on one side of a share of them, or right on it."""
    return max(0, min(count, round(share * count) + random.randint(-2, 2)))


def gopher_document(random: random.Random, kind: int) -> str:
    count = random.randint(48, 53) if kind == 0 else random.randint(60, 140)
    words = [random.choice(COMMON) if random.random() < 0.4 else fresh(random, 2, 8) for _ in range(count)]
    if kind == 1:
        size = random.choice((2, 3, 10, 11))
        words = ["to", "to", *(fresh(random, size, size) for _ in range(count))]
    if kind == 2:
        mark = random.choice(("#", "...", "…"))
        words += [mark] * near(random, 0.1, count * 10 // 9)
    if kind == 3:
        words += [str(random.randint(1, 99)) for _ in range(near(random, 0.2, count * 5 // 4))]
    if kind == 4:
        words = [word for word in words if word not in STOPS] + ["the"] * random.randint(0, 3) + ["The"]
        words += [fresh(random, 3, 6) for _ in range(50)]
    random.shuffle(words)
    lines = [" ".join(words[i : i + 5]) for i in range(0, len(words), 5)]
    if kind == 5:
        for i in random.sample(range(len(lines)), near(random, 0.9, len(lines))):
            lines[i] = random.choice(("• ", "- ", "  - ")) + lines[i]
    if kind == 6:
        for i in random.sample(range(len(lines)), near(random, 0.3, len(lines))):
            lines[i] += random.choice(("...", "…", "... "))
    return "\n".join(lines)


def repetition_document(random: random.Random, kind: int) -> str:
    lines = [sentence(random, random.randint(3, 9)) for _ in range(20)]
    if kind == 0:  # lines
        for i in random.sample(range(1, 20), near(random, 0.3, 20)):
            lines[i] = "a b" if random.random() < 0.5 else lines[0]
    if kind == 1:  # paragraphs
        for i in random.sample(range(1, 20), near(random, 0.25, 20)):
            lines[i] = lines[0]
        return "\n\n".join(lines)
    if kind == 2:  # top n-grams
        words = " ".join(lines).split()
        n, share = random.choice(((2, 0.2), (3, 0.18), (4, 0.16)))
        phrase = [fresh(random, 4, 7) for _ in range(n)]
        for _ in range(near(random, share * random.uniform(0.9, 2), len(words) // n)):
            at = random.randrange(len(words))
            words[at:at] = [*phrase, fresh(random, 2, 5)]
        return " ".join(words)
    if kind == 3:  # repeated n-grams
        words = " ".join(lines).split()
        n = random.randint(5, 14)
        piece = words[:n]
        for _ in range(random.randint(1, 4)):
            at = random.randrange(n, len(words))
            words[at:at] = [*piece, fresh(random, 2, 5)]
        return " ".join(words)
    return random.choice(("\n", "\n\n", "\n\n\n", " ")).join(lines) + "\n" * random.randint(0, 3)


def c4_document(random: random.Random, kind: int) -> str:
    lines = [sentence(random, random.randint(3, 8)) for _ in range(random.randint(3, 7))]
    odd = {
        0: lambda: sentence(random, random.randint(1, 4)),
        1: lambda: sentence(random, 5, random.choice((".", "...", "?", "!", '"', "'", ",", "", ":", "…"))),
        2: lambda: "x" * random.randint(999, 1002) + " is a word.",
        3: lambda: random.choice(
            ("Enable JavaScript now please.", "We use cookies on this site.", "Read our Terms of Use!")
        ),
        4: lambda: random.choice(
            ("Lorem ipsum dolor sit amet.", "lorem ipsum without an end", "A { in a line.", "{ none")
        ),
        5: lambda: sentence(
            random, 4, random.choice((".[1]", ".[edit]", ".[citation needed]", ". [a]", "[].", ".[12"))
        ),
        6: lambda: f"{sentence(random, 2)} {sentence(random, 2, '?!')} {sentence(random, 1, '...')} And then.",
    }[kind]
    for _ in range(random.randint(0, 3)):
        lines.insert(random.randint(0, len(lines)), odd())
    return random.choice(("\n", "\n\n", " \n", "\r\n")).join(lines)


def fineweb_document(random: random.Random, kind: int) -> str:
    count = random.choice((25, 50, 100)) if kind != 3 else random.randint(5, 40)
    lines = [sentence(random, 8, "") + fresh(random, 20, 30) for _ in range(count)]
    for i in random.sample(range(count), near(random, 0.12, count) if kind == 0 else count):
        lines[i] += random.choice((".", "!", "?"))
    if kind == 1:
        for i in random.sample(range(count), near(random, 0.67, count)):
            lines[i] = fresh(random, 27, 30)[: random.randint(28, 30)] + random.choice(("", "."))
            lines[i] = (fresh(random, 29, 31) if random.random() < 0.2 else lines[i]).ljust(
                31 if random.random() < 0.1 else 0, "x"
            )
    if kind == 2:
        lines += [random.choice(lines)[: random.randint(10, 80)] for _ in range(random.randint(0, 3))]
        lines += [lines[0]] * random.randint(0, 2)
    if kind == 3:
        lines = [sentence(random, random.randint(2, 6)) + "x" * 30 for _ in range(count)]
        return random.choice(("\n", "\n\n")).join(lines)
    return "\n".join(lines)


def code_document(random: random.Random, kind: int) -> str:
    lines = [f"{fresh(random, 3, 9)} = {fresh(random, 5, 30)}({random.randint(1, 99)})" for _ in range(20)]
    if kind == 0:
        lines[3] = "x" * random.randint(998, 1002)
    if kind == 1:
        size = random.randint(99, 101)
        lines = ["y" * (size + (i % 3 - 1)) for i in range(30)]
    if kind == 2:
        letters = random.randint(23, 27)
        lines = ["".join(random.sample("a" * letters + "+" * (99 - letters), 99)) for _ in range(9)]
    if kind == 3:
        mark = random.choice(("Auto-generated by x", "AUTOGENERATED", "This file is generated", "generated by hand"))
        lines.insert(random.randint(0, 8), f"# {mark}")
    return "\n".join(lines)


KINDS = {"gopher": 8, "repetition": 5, "c4": 7, "fineweb": 5, "code": 5}
MAKE = {
    "gopher": gopher_document,
    "repetition": repetition_document,
    "c4": c4_document,
    "fineweb": fineweb_document,
    "code": code_document,
}


def documents(name: str) -> list[str]:
    source = random.Random(name)
    return [MAKE[name](source, i % KINDS[name]) for i in range(DOCUMENTS)]


def reasons_of(name: str, text: str) -> str | None:
    if name == "c4":
        return c4_quality(text, C4Rules())[1]
    if name == "gopher":
        return gopher_quality(text, GopherRules())
    if name == "repetition":
        return gopher_repetition(text, GopherRepetitionRules())
    if name == "fineweb":
        return fineweb_quality(text, FineWebRules())
    return code_quality(text, CodeRules())


REFERENCE: dict[str, reference.Rule] = {
    "gopher": reference.gopher,
    "repetition": reference.gopher_repetition,
    "c4": lambda text: reference.c4(text) is not None,
    "fineweb": reference.fineweb,
    "code": reference.code,
}


@pytest.mark.parametrize("name", list(MAKE))
def test_every_decision_is_the_reference_s(name: str) -> None:
    texts = documents(name)
    wrong = [text for text in texts if (reasons_of(name, text) is None) != REFERENCE[name](text)]
    assert wrong == []


def test_c4_leaves_the_text_of_the_reference() -> None:
    for text in documents("c4"):
        cleaned, reason = c4_quality(text, C4Rules())
        assert reference.c4(text) == (None if reason else cleaned)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gopher",
            "too_few_words mean_word_length hashes ellipses bullet_lines ellipsis_lines stop_words",
        ),
        ("repetition", "lines line_chars paragraph_chars top_2_gram top_3_gram top_4_gram 5_grams 10_grams"),
        ("c4", "lorem_ipsum curly_bracket too_few_sentences"),
        ("fineweb", "unpunctuated_lines short_lines duplicate_lines list"),
        ("code", "long_line mean_line_length alphanumeric generated"),
    ],
)
def test_the_documents_stand_on_both_sides_of_each_rule(name: str, expected: str) -> None:
    found = Counter(reasons_of(name, text) for text in documents(name))
    assert found[None] >= 50
    assert {f"{name}_{rule}" for rule in expected.split()} <= found.keys(), found


def test_thresholds_can_be_overridden() -> None:
    text = sentence(random.Random(1), 20)
    assert gopher_quality(text, GopherRules()) == "gopher_too_few_words"
    assert gopher_quality(text, GopherRules(min_words=5, min_stop_words=0)) is None
