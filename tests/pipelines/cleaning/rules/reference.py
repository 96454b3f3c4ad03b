"""The published rules once more, as plainly as can be, to compare decisions with.

They follow datatrove's filters (huggingface/datatrove, src/datatrove/pipeline/filters/): gopher_quality_filter.py at
5c254fa5, gopher_repetition_filter.py and c4_filters.py at f4233219, fineweb_quality_filter.py as in its releases from
0.3 on (lines without text do not count, bounds are inclusive), and The Stack's basic filter. Words and sentences come
from `words` and `sentences` here, a scanner by character instead of a regular expression.
"""

import unicodedata
from collections.abc import Callable

ASCII_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
SYMBOLS = set(ASCII_PUNCTUATION) | set("—”％１〈、━【「」，】；“《„’∶´．（–？！：～«〉》）。…►»")
STOPS = set(".!?。？！؟।…") - {"…"}


def is_word_char(char: str) -> bool:
    return char == "_" or char.isalnum() or unicodedata.category(char).startswith("N")


def words(text: str) -> list[str]:
    found, i = [], 0
    while i < len(text):
        start = i
        if text[i].isspace():
            i += 1
            continue
        if text[i : i + 2] == "..":
            while i < len(text) and text[i] == ".":
                i += 1
        elif is_word_char(text[i]):
            while i < len(text) and (
                is_word_char(text[i]) or (text[i] in "'’" and i + 1 < len(text) and is_word_char(text[i + 1]))
            ):
                i += 1
        else:
            i += 1
        found.append(text[start:i])
    return found


def sentences(text: str) -> int:
    """A sentence starts at the first word, and at each word after a full stop that is not punctuation."""
    starts, after_stop = 0, False
    for word in words(text):
        if starts == 0:
            starts = 1
        elif after_stop and word not in STOPS and not set(word) <= SYMBOLS:
            starts, after_stop = starts + 1, False
        if word in STOPS:
            after_stop = True
    return starts


def duplicates(elements: list[str]) -> tuple[int, int]:
    again = [element for i, element in enumerate(elements) if element in elements[:i]]
    return len(again), sum(len(element) for element in again)


def gopher(text: str) -> bool:
    """True if the document is kept."""
    all_words = words(text)
    n_words = len(all_words)
    real = [word for word in all_words if any(char not in SYMBOLS for char in word)]
    if len(real) < 50 or len(real) > 100_000:
        return False
    mean = sum(len(word) for word in real) / len(real)
    if mean < 3 or mean > 10:
        return False
    if text.count("#") / n_words > 0.1 or (text.count("...") + text.count("…")) / n_words > 0.1:
        return False
    lines = text.splitlines()
    bullets = [line for line in lines if line.lstrip()[:1] in ("•", "-")]
    ellipses = [line for line in lines if line.rstrip()[-3:] == "..." or line.rstrip()[-1:] == "…"]
    if len(bullets) / len(lines) > 0.9 or len(ellipses) / len(lines) > 0.3:
        return False
    if sum(1 for word in all_words if any(char.isalpha() for char in word)) / n_words < 0.8:
        return False
    stop_words = {"the", "be", "to", "of", "and", "that", "have", "with"}
    return sum(1 for word in all_words if word in stop_words) >= 2


def gopher_repetition(text: str) -> bool:
    paragraphs = split(text.strip(), 2)
    count, chars = duplicates(paragraphs)
    if count / len(paragraphs) > 0.3 or chars / len(text) > 0.2:
        return False
    lines = split(text, 1)
    count, chars = duplicates(lines)
    if count / len(lines) > 0.3 or chars / len(text) > 0.2:
        return False
    all_words = words(text)
    for n, share in ((2, 0.2), (3, 0.18), (4, 0.16)):
        n_grams = [" ".join(all_words[i : i + n]) for i in range(len(all_words) - n + 1)]
        if n_grams:
            top = max(n_grams, key=n_grams.count)  # the first of the most frequent
            if len(top) * n_grams.count(top) / len(text) > share:
                return False
    for n, share in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)):
        seen, chars, i = [], 0, 0
        while i <= len(all_words) - n:
            n_gram = "".join(all_words[i : i + n])
            if n_gram in seen:
                chars += len(n_gram)
                i += n
            else:
                seen.append(n_gram)
                i += 1
        if chars / len(text) > share:
            return False
    return True


def split(text: str, least: int) -> list[str]:
    """Splits at runs of at least `least` newlines."""
    parts, i, start = [], 0, 0
    while i < len(text):
        run = len(text[i:]) - len(text[i:].lstrip("\n"))
        if run >= least:
            parts.append(text[start:i])
            start = i + run
        i += max(run, 1)
    return [*parts, text[start:]]


def without_citations(line: str) -> str:
    out, i = "", 0
    while i < len(line):
        end = line.find("]", i)
        if line[i] == "[" and end > 0:
            inside = line[i + 1 : end]
            if inside in ("edit", "citation needed") or all(char.isdecimal() for char in inside):
                i = end + 1
                continue
        out += line[i]
        i += 1
    return out


def c4(text: str) -> str | None:
    """The text that is kept, or None."""
    count, kept = 0, []
    for line in text.splitlines():
        line = line.strip()
        parts = line.split()
        if any(len(part) > 1000 for part in parts):
            continue
        line = without_citations(line)
        if line[-1:] not in (".", "?", "!", '"', "'") or line[-3:] == "..." or not line:
            continue
        if len(parts) < 3:
            continue
        lower = line.lower()
        if "lorem ipsum" in lower:
            return None
        if "javascript" in lower:
            continue
        if "{" in line:
            return None
        policies = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
        if any(policy in lower for policy in policies):
            continue
        count += sentences(line)
        kept.append(line)
    return "\n".join(kept).strip() if count >= 5 else None


def fineweb(text: str) -> bool:
    lines = [line for line in text.split("\n") if line.strip() != ""]
    if not lines:
        return False
    if sum(1 for line in lines if line[-1] in STOPS) / len(lines) < 0.12:
        return False
    if sum(1 for line in lines if len(line) <= 30) / len(lines) > 0.67:
        return False
    if duplicates(lines)[1] / len(text.replace("\n", "")) > 0.01:
        return False
    return text.count("\n") / len(words(text)) <= 0.3


def code(text: str) -> bool:
    lines = text.splitlines()
    if max(len(line) for line in lines) > 1000 or sum(len(line) for line in lines) / len(lines) > 100:
        return False
    if sum(1 for char in text if char.isalnum()) / len(text) < 0.25:
        return False
    marks = (
        "auto-generated",
        "autogenerated",
        "automatically generated",
        "generated automatically",
        "this file is generated",
    )
    return not any(mark in line.lower() for line in lines[:5] for mark in marks)


Rule = Callable[[str], object]
