"""The rules of C4 (arXiv 1910.10683) and FineWeb (arXiv 2406.17557) for web pages. datatrove's filters make the same
decisions.
"""

from __future__ import annotations

import re

from raytide.core.specs.cleaning import C4Rules, FineWebRules
from raytide.pipelines.cleaning.rules.words import SENTENCE_ENDS, count_sentences, repeated, split_words

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_LINE_ENDS = (".", "?", "!", '"', "'")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_FINEWEB_ENDS = tuple(SENTENCE_ENDS)


def c4_quality(text: str, rules: C4Rules) -> tuple[str, str | None]:
    """Returns (text without bad lines, reason to drop the text). The reason is None if the text is kept."""
    kept: list[str] = []
    sentences = 0
    for line in text.splitlines():
        cleaned = _c4_line(line.strip(), rules)
        if cleaned is None:
            continue
        lowered = cleaned.lower()
        if rules.drop_lorem_ipsum and "lorem ipsum" in lowered:
            return text, "c4_lorem_ipsum"
        if rules.remove_javascript_lines and "javascript" in lowered:
            continue
        if rules.drop_curly_bracket and "{" in cleaned:
            return text, "c4_curly_bracket"
        if rules.remove_policy_lines and any(policy in lowered for policy in _POLICIES):
            continue
        sentences += count_sentences(cleaned)
        kept.append(cleaned)
    if sentences < rules.min_sentences:
        return text, "c4_too_few_sentences"
    return "\n".join(kept).strip(), None


def _c4_line(line: str, rules: C4Rules) -> str | None:
    """Returns the line without citations, or None if its words or its end are bad."""
    words = line.split()
    if any(len(word) > rules.max_word_chars for word in words):
        return None
    if rules.remove_citations:
        line = _CITATION.sub("", line)
    if rules.require_terminal_punctuation and (not line.endswith(_LINE_ENDS) or line.endswith("...")):
        return None
    return line if len(words) >= rules.min_words_per_line else None


def fineweb_quality(text: str, rules: FineWebRules) -> str | None:
    """Returns the first of FineWeb's rules that the text violates, or None."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "fineweb_empty"
    if sum(line.endswith(_FINEWEB_ENDS) for line in lines) / len(lines) < rules.min_punctuated_lines:
        return "fineweb_unpunctuated_lines"
    if sum(len(line) <= rules.short_line_chars for line in lines) / len(lines) > rules.max_short_lines:
        return "fineweb_short_lines"
    if repeated(lines)[1] / (len(text) - text.count("\n")) > rules.max_duplicate_line_chars:
        return "fineweb_duplicate_lines"
    if text.count("\n") / len(split_words(text)) > rules.max_newlines_per_word:
        return "fineweb_list"
    return None
