"""Finds keys, tokens and passwords in code, by the formats that their issuers document."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Any

_FORMATS = {
    "private_key": r"-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----[A-Za-z0-9+/=\s:,.()\\\-]+?"
    r"-----END (?:[A-Z]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----",
    "aws_key_id": r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}\b",
    "github_key": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,251}|github_pat_[A-Za-z0-9_]{22,255})\b",
    "gitlab_key": r"\bglpat-[A-Za-z0-9_\-]{20,64}",
    "slack_key": r"\bxox[abeoprs]-[A-Za-z0-9\-]{10,250}",
    "google_key": r"\bAIza[A-Za-z0-9_\-]{35}",
    "stripe_key": r"\b(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,247}\b",
    "hugging_face_key": r"\bhf_[A-Za-z0-9]{34}\b",
    "openai_key": r"\bsk-(?:proj-|ant-[a-z0-9]+-)?[A-Za-z0-9_\-]{32,200}",
    "jwt": r"\beyJ[A-Za-z0-9_\-]{10,}\.eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}",
    "url_login": r"\b[a-z][a-z0-9+.\-]{1,20}://[^\s:/@'\"<>]{0,100}:[^\s:/@'\"<>]{3,100}@",
}
_ASSIGNED = (
    r"(?i)\b[\w.\-]{0,40}(?:passw(?:or)?d|secret|api_?key|auth_?token|access_?token|private_?key)[\w\-]{0,20}"
    r"['\"]?\s{0,3}(?:=|:|=>)\s{0,3}['\"]([^'\"\s]{8,200})['\"]"
)
MIN_ENTROPY_BITS = 3.0
"""The least entropy per character of an assigned secret. Values such as `changeme` have less or are in `_PLACEHOLDERS`.
"""
_PLACEHOLDERS = ("example", "your", "xxx", "changeme", "placeholder", "${", "{{", "<", "none", "null", "test", "...")


def replace_secrets(text: str) -> tuple[str, Counter[str]]:
    """Returns the text with each secret replaced by `<SECRET>`, and the number of secrets of each type."""
    counts: Counter[str] = Counter()
    formats, assigned = _compiled()

    def known(match: Any) -> str:
        kind = str(match.lastgroup)
        counts[kind] += 1
        if kind != "url_login":
            return "<SECRET>"
        scheme, _, rest = match.group().partition("://")
        return f"{scheme}://{rest.partition(':')[0]}:<SECRET>@"

    def value(match: Any) -> str:
        found: str = match.group()
        secret: str = match.group(1)
        if secret == "<SECRET>" or not _is_random(secret):  # nosec B105
            return found
        counts["assigned"] += 1
        start = match.start(1) - match.start()
        return f"{found[:start]}<SECRET>{found[start + len(secret) :]}"

    return assigned.sub(value, formats.sub(known, text)), counts


@lru_cache(maxsize=1)
def _compiled() -> tuple[Any, Any]:
    import re2

    formats = "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _FORMATS.items())
    return re2.compile(formats), re2.compile(_ASSIGNED)


def _is_random(secret: str) -> bool:
    if any(each in secret.lower() for each in _PLACEHOLDERS):
        return False
    return entropy_bits(secret) >= MIN_ENTROPY_BITS


def entropy_bits(text: str) -> float:
    """Returns the Shannon entropy per character of the text, in bits."""
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())
