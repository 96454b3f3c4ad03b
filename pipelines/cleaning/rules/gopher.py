"""Gopher's rules (Rae et al. 2021, arXiv 2112.11446, appendix A.1). The rules make the same decisions as datatrove's
GopherQualityFilter and GopherRepetitionFilter.
"""

from __future__ import annotations

import re
from collections import Counter

from raytide.core.specs.cleaning import GopherRepetitionRules, GopherRules
from raytide.pipelines.cleaning.rules.words import SYMBOLS, repeated, split_words

_PARAGRAPHS = re.compile(r"\n{2,}")
_LINES = re.compile(r"\n+")
_ELLIPSES = ("...", "…")


def gopher_quality(text: str, rules: GopherRules) -> str | None:
    """Returns the first of Gopher's quality rules that the text violates, or None."""
    words = split_words(text)
    lengths = [len(word) for word in words if not SYMBOLS.issuperset(word)]
    if len(lengths) < max(rules.min_words, 1):
        return "gopher_too_few_words"
    if len(lengths) > rules.max_words:
        return "gopher_too_many_words"
    if not rules.min_mean_word_chars <= sum(lengths) / len(lengths) <= rules.max_mean_word_chars:
        return "gopher_mean_word_length"
    return _symbols(text, len(words), rules) or _lines(text, rules) or _vocabulary(words, rules)


def _symbols(text: str, words: int, rules: GopherRules) -> str | None:
    if text.count("#") / words > rules.max_symbols_per_word:
        return "gopher_hashes"
    if sum(map(text.count, _ELLIPSES)) / words > rules.max_symbols_per_word:
        return "gopher_ellipses"
    return None


def _lines(text: str, rules: GopherRules) -> str | None:
    lines = text.splitlines()
    if sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines) > rules.max_bullet_lines:
        return "gopher_bullet_lines"
    if sum(line.rstrip().endswith(_ELLIPSES) for line in lines) / len(lines) > rules.max_ellipsis_lines:
        return "gopher_ellipsis_lines"
    return None


def _vocabulary(words: list[str], rules: GopherRules) -> str | None:
    if sum(any(map(str.isalpha, word)) for word in words) / len(words) < rules.min_words_with_letter:
        return "gopher_words_without_letter"
    if sum(map(words.count, set(rules.stop_words))) < rules.min_stop_words:
        return "gopher_stop_words"
    return None


def gopher_repetition(text: str, rules: GopherRepetitionRules) -> str | None:
    """Returns the first of Gopher's repetition rules that the text violates, or None."""
    if not text:
        return None
    paragraphs = _PARAGRAPHS.split(text.strip())
    count, chars = repeated(paragraphs)
    if count / len(paragraphs) > rules.max_duplicate_paragraphs:
        return "repetition_paragraphs"
    if chars / len(text) > rules.max_duplicate_paragraph_chars:
        return "repetition_paragraph_chars"
    lines = _LINES.split(text)
    count, chars = repeated(lines)
    if count / len(lines) > rules.max_duplicate_lines:
        return "repetition_lines"
    if chars / len(text) > rules.max_duplicate_line_chars:
        return "repetition_line_chars"
    return _n_grams(text, rules)


def _n_grams(text: str, rules: GopherRepetitionRules) -> str | None:
    words = split_words(text)
    for n, share in rules.top_n_grams:
        if _top_n_gram_chars(words, n) / len(text) > share:
            return f"repetition_top_{n}_gram"
    for n, share in rules.duplicate_n_grams:
        if _duplicate_n_gram_chars(words, n) / len(text) > share:
            return f"repetition_{n}_grams"
    return None


def _top_n_gram_chars(words: list[str], n: int) -> int:
    """Returns the number of characters of all occurrences of the most frequent n-gram, with the spaces inside it."""
    counts = Counter(zip(*(words[i:] for i in range(n)), strict=False))
    if not counts:
        return 0
    top, times = counts.most_common(1)[0]
    return (sum(map(len, top)) + n - 1) * times


def _duplicate_n_gram_chars(words: list[str], n: int) -> int:
    """Returns the number of characters, without spaces, in n-grams that occurred before; no character counts twice."""
    joined, ends = "".join(words), [0]
    for word in words:
        ends.append(ends[-1] + len(word))
    seen: set[str] = set()
    chars = i = 0
    while i + n < len(ends):
        n_gram = joined[ends[i] : ends[i + n]]
        if n_gram in seen:
            chars, i = chars + len(n_gram), i + n
        else:
            seen.add(n_gram)
            i += 1
    return chars
