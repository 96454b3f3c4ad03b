"""Finds earlier occurrences of the last tokens of a text. Positions with equal trigrams are chained, as in LZ77
compressors (RFC 1951, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_MATCH = 3
"""The number of tokens in a trigram; shorter matches are not found."""
MAX_MATCH = 64
SEPARATOR = (1 << 21) - 1
"""The separator between the texts of one index. It is no token: vocabularies are smaller."""

_ENOUGH = 32
_TRIED = 16
_BITS = 21
_TRIGRAM = (1 << 3 * _BITS) - 1


@dataclass(slots=True)
class Match:
    """An earlier occurrence of the end of a text: the text's last `length` tokens also stand directly before position
    `at` in `tokens`. The tokens from `at` on are taken as a guess of the text's next tokens.
    """

    tokens: list[int]
    at: int
    length: int

    def follow(self, token: int) -> bool:
        """Extends the match by a new token of the text. Returns False if the guess was another token."""
        if self.at >= len(self.tokens) or self.tokens[self.at] != token:
            return False
        self.at += 1
        self.length += 1
        return True

    def draft(self, count: int) -> list[int]:
        """Returns up to `count` tokens as a guess. If fewer than `count` tokens are left in `tokens`, the guess repeats
        them, as in LZ77.
        """
        draft = self.tokens[self.at : self.at + count]
        if SEPARATOR in draft:
            return draft[: draft.index(SEPARATOR)]
        period = len(draft)
        while period and len(draft) < count:
            draft.append(draft[-period])
        return draft


class SuffixIndex:
    """An index of the trigrams in a list of tokens. The list may grow at its end. The list's last token is not indexed,
    because it has no next token that could be a guess.

    An indexed token takes about 100 bytes and a third of a microsecond. Tokens before `start` are not indexed.
    """

    def __init__(self, tokens: list[int], start: int = 0) -> None:
        self.tokens = tokens
        self._start = start
        self._latest: dict[int, int] = {}  # trigram -> the position behind its latest occurrence
        self._before: list[int] = []  # for each position from `start` + 3 on: the one before it with that trigram
        self._key, self._keyed = 0, start

    def extend(self) -> None:
        """Indexes the tokens that were added to the list since the last call."""
        tokens, latest, before, key, first = self.tokens, self._latest, self._before, self._key, self._start + MIN_MATCH
        for at in range(self._keyed, len(tokens) - 1):
            key = (key << _BITS | tokens[at]) & _TRIGRAM
            if at + 1 >= first:
                before.append(latest.get(key, -1))
                latest[key] = at + 1
        self._key, self._keyed = key, max(self._keyed, len(tokens) - 1)

    def find(self, text: list[int]) -> Match | None:
        """Returns the longest match for the end of a text. Only the latest few occurrences are compared. Among equally
        long matches, returns the latest. Returns None if nothing matches.
        """
        if len(text) < MIN_MATCH:
            return None
        at = self._latest.get((text[-3] << _BITS | text[-2]) << _BITS | text[-1], -1)
        best: Match | None = None
        for _ in range(_TRIED):
            if at < 0:
                break
            length = self._length(text, at)
            if best is None or length > best.length:
                best = Match(self.tokens, at, length)
            if length >= _ENOUGH:
                break
            at = self._before[at - self._start - MIN_MATCH]
        return best

    def _length(self, text: list[int], at: int) -> int:
        tokens, length = self.tokens, MIN_MATCH
        most = min(MAX_MATCH, len(text), at - self._start)
        while length < most and tokens[at - 1 - length] == text[-1 - length]:
            length += 1
        return length
