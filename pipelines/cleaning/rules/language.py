"""Keeps the documents that are in one of the chosen languages. Detects the language with py3langid, whose wheel
contains the model.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from raytide.core.specs.cleaning import LanguageRule

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier


def language_of(text: str, max_chars: int) -> tuple[str, float]:
    """Returns the language of the beginning of a text, as an ISO 639-1 code. Also returns the probability that this
    language is correct. The beginning is the first `max_chars` characters.
    """
    code, confidence = _identifier().classify(text[:max_chars])
    return str(code), float(confidence)


def language_rule(language: str, confidence: float, rule: LanguageRule) -> str | None:
    """Returns the reason to drop a text in this language, or None to keep it."""
    if language not in rule.keep:
        return "language_other"
    return "language_unsure" if confidence < rule.min_confidence else None


@lru_cache(maxsize=1)
def _identifier() -> LanguageIdentifier:
    """Returns the model. It is loaded once in each process, which takes 0.4 s."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
