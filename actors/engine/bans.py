"""Tokens that may not come next: end tokens before `min_tokens`, and those that would complete a bad word."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from raytide.actors.engine.sequence import Sequence

__all__ = ["bad_word_tokens", "banned_tokens"]


def banned_tokens(seq: Sequence) -> list[int]:
    """What the sequence's next token must not be."""
    banned = list(seq.stop_token_ids) if seq.output_len < seq.params.min_tokens else []
    for *start, last in seq.bad_words:
        if not start or (len(start) <= seq.output_len and seq.tokens[-len(start) :] == start):
            banned.append(last)
    return banned


def bad_word_tokens(
    words: Items[str], encode: Callable[[str], list[int]], token_of: Callable[[str], int | None]
) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell each word as the tokenizer would: alone and after a space, at a word's start and
    inside one.

    Other ways to spell it, which the tokenizer never writes, stay possible.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            found[tuple(encode(text))] = None
        inside = token_of(word)
        if inside is not None:
            found[(inside,)] = None
    found.pop((), None)
    return tuple(found)
