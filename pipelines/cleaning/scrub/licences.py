"""Removes the licence header of a source file: the first comment, if it mentions copyright or a licence."""

from __future__ import annotations

import re

_LICENCE = re.compile(
    r"copyright|\(c\)\s*\d{4}|©|licen[cs]ed?\b|spdx-|all rights reserved|redistribution and use", re.IGNORECASE
)
_BLOCKS = (("/*", "*/"), ("<!--", "-->"), ('"""', '"""'), ("'''", "'''"), ("{-", "-}"), ("(*", "*)"))
_LINE_MARKS = ("#", "//", "--", ";", "%", "REM ", '"')
_NOT_COMMENT = re.compile(
    r"#(?:include|import|define|undef|if|ifdef|ifndef|elif|else|endif|pragma|error|warning|line|region|endregion)\b"
    r'|"\S'
)
"""Lines of code that begin like a comment: a directive of C or C#, and a quoted text, as in CSV. A comment of Vim has a
space after its quote.
"""
_FIRST_LINES = re.compile(r"(?:#![^\n]*\n|#[^\n]*coding[:=][^\n]*\n|<\?(?:php|xml)[^\n]*\n|\s*\n)*")


def strip_licence_header(text: str) -> str:
    """Returns the text without its first comment if that comment is a licence header. A `#!` line stays."""
    start = match.end() if (match := _FIRST_LINES.match(text)) else 0
    end = _comment_end(text, start)
    if end is None or not _LICENCE.search(text[start:end]):
        return text
    return text[:start] + text[end:].lstrip("\n")


def _comment_end(text: str, start: int) -> int | None:
    """Returns the end of the comment at `start`; None if there is no comment, or if it is never closed."""
    rest = text[start:]
    indent = len(rest) - len(rest.lstrip(" \t"))
    for opening, closing in _BLOCKS:
        if rest.startswith(opening, indent):
            end = rest.find(closing, indent + len(opening))
            return None if end < 0 else start + end + len(closing)
    mark = next((mark for mark in _LINE_MARKS if rest.startswith(mark, indent)), None)
    if mark is None or _NOT_COMMENT.match(rest, indent):
        return None
    length = 0
    for line in rest.splitlines(keepends=True):
        if not line.lstrip().startswith(mark.strip()) or _NOT_COMMENT.match(line.lstrip()):
            break
        length += len(line)
    return start + length
