"""Replaces personal data in text by placeholders.

google-re2 finds candidates by patterns in linear time. Each candidate is checked before it is replaced.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from raytide.core.specs.cleaning import PiiKind

_DAY, _MONTH, _YEAR = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:0?[1-9]|1[0-2])", r"(?:19|20)\d\d"
_DATE = rf"{_YEAR}[ .\-]{_MONTH}[ .\-]{_DAY}|{_DAY}[ .\-]{_DAY}[ .\-]{_YEAR}"
_PATTERNS: dict[PiiKind, str] = {
    "email": r"\b[A-Za-z0-9][A-Za-z0-9._%+\-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,62})\.){1,8}[A-Za-z]{2,24}\b",
    "iban": r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b",
    "credit_card": r"\b\d(?:[ \-]?\d){12,18}\b",
    "ssn": r"\b\d{3}-\d{2}-\d{4}\b",
    # A date is found as a whole, so that the hour after it is not taken for a part of a number.
    "phone": rf"\b(?:{_DATE})\b|"
    r"(?:\+\d{1,3}[ .\-]?)?(?:\(\d{2,4}\)|\b\d{2,4})[ .\-]\d{2,4}[ .\-]\d{2,4}(?:[ .\-]\d{2,4})?\b"
    r"|\+\d{8,15}\b|\+[1-9]\d{0,2}(?:[ \-]?(?:\(\d{1,4}\)|\d{1,8})){1,6}\b",
    # Short forms of IPv6 count only in the public range 2000::/3: `a::b` is code.
    "ip": r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}\b"
    r"|\b[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{1,4}\b",
}
_NOT_DIGIT = re.compile(r"\D")
_HAS_DATE = re.compile(rf"\b(?:{_DATE.replace(' ', '')})\b")  # dates with spaces may be parts of numbers


def scrub_personal(text: str, kinds: Sequence[PiiKind]) -> tuple[str, Counter[str]]:
    """Returns the text with placeholders such as `<EMAIL>`, and the number of replacements of each type."""
    counts: Counter[str] = Counter()

    def replace(match: Any) -> str:
        found: str = match.group()
        kind: PiiKind = match.lastgroup
        length = _iban_length(found) if kind == "iban" else len(found) * _CHECKS[kind](found)
        if not length:
            return found
        counts[kind] += 1
        return f"<{kind.upper()}>{found[length:]}"

    for pattern in _compiled(tuple(kinds)):
        text = pattern.sub(replace, text)
    return text, counts


@lru_cache(maxsize=16)
def _compiled(kinds: tuple[PiiKind, ...]) -> tuple[Any, ...]:
    """Returns a pattern for each kind, most specific first: a card's digits must not be taken for a phone number."""
    import re2

    return tuple(re2.compile(f"(?P<{kind}>{pattern})") for kind, pattern in _PATTERNS.items() if kind in kinds)


def is_luhn(digits: str) -> bool:
    """Returns whether the last digit is the correct Luhn check digit (ISO/IEC 7812-1, annex B)."""
    total = 0
    for i, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + i % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def is_iban(text: str) -> bool:
    """Returns whether the check digits of an account number are correct: the number modulo 97 must be 1 (ISO 13616)."""
    number = text.replace(" ", "")
    if not 15 <= len(number) <= 34:
        return False
    return int("".join(str(int(char, 36)) for char in number[4:] + number[:4])) % 97 == 1


def _iban_length(found: str) -> int:
    """Returns the length of the IBAN with which the match begins, as words may follow; 0 if there is none."""
    ends = [len(found), *(i for i in range(len(found) - 1, 0, -1) if found[i] == " ")]
    return next((end for end in ends if is_iban(found[:end])), 0)


def _is_card(found: str) -> bool:
    digits = _NOT_DIGIT.sub("", found)
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and digits[0] in "23456" and is_luhn(digits)


def _is_phone(found: str) -> bool:
    """Returns whether the match has the digits of an international number (E.164) and has no date in it, such as
    2024-05-17.
    """
    digits = _NOT_DIGIT.sub("", found)
    least, most = (9, 15) if found.startswith("+") else (10, 11)
    return least <= len(digits) <= most and not _HAS_DATE.search(found)


def _is_ssn(found: str) -> bool:
    """Returns whether the number can be assigned: no part is zero, and the area is neither 666 nor above 899."""
    area, group, serial = found.split("-")
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def _is_public_ip(found: str) -> bool:
    """Returns whether the address is a public one. Version numbers and private addresses identify nobody."""
    try:
        return ipaddress.ip_address(found).is_global
    except ValueError:
        return False


_CHECKS: dict[PiiKind, Callable[[str], bool]] = {
    "email": lambda found: ".." not in found and not found.lower().endswith((".png", ".jpg", ".gif", ".svg")),
    "iban": is_iban,
    "credit_card": _is_card,
    "ssn": _is_ssn,
    "phone": _is_phone,
    "ip": _is_public_ip,
}
