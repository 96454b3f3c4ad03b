"""Earlier answers, in which a new one is looked up. They are kept by the salt of the prefix cache: a tenant must not
learn from the speed of its own answers what another's were.
"""

from __future__ import annotations

from collections import OrderedDict

from raytide.actors.engine.scheduler.speculation.acceptance import Acceptance
from raytide.actors.engine.scheduler.speculation.suffix_index import MIN_MATCH, SEPARATOR, Match, SuffixIndex
from raytide.actors.engine.sequence import Sequence

_MOST_TOKENS = 1 << 17
"""Tokens of all salts together; a token takes about 100 bytes."""
_GENERATION_TOKENS = 1 << 14


class AnswerHistory:
    """The latest answers under one salt, and how often guesses were right there.

    Two generations of answers: when the younger is full, it becomes the older, whose place is free again at once.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._young, self._old = SuffixIndex([]), SuffixIndex([])

    @property
    def num_tokens(self) -> int:
        return len(self._young.tokens) + len(self._old.tokens)

    def find(self, text: list[int]) -> Match | None:
        """Returns the longest match of the end of a text; among equals the latest."""
        young, old = self._young.find(text), self._old.find(text)
        if young is None or old is None:
            return young or old
        return old if old.length > young.length else young

    def add(self, seq: Sequence) -> None:
        """Adds the output of a sequence that has ended, behind the prompt's last tokens."""
        first = max(0, seq.prompt_len - MIN_MATCH, len(seq.tokens) - _GENERATION_TOKENS)
        if len(self._young.tokens) + len(seq.tokens) - first > _GENERATION_TOKENS:
            self._young, self._old = SuffixIndex([]), self._young
        self._young.tokens += [*seq.tokens[first:], SEPARATOR]
        self._young.extend()


class AnswerHistories:
    """The histories of the salts that were used last."""

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._by_salt: OrderedDict[bytes, AnswerHistory] = OrderedDict()
        self._most_tokens = most_tokens
        self._num_tokens = 0

    def of(self, salt: bytes) -> AnswerHistory:
        """Returns a salt's history, which may be a new one."""
        history = self._by_salt.get(salt)
        if history is None:
            history = self._by_salt[salt] = AnswerHistory()
            self._drop_oldest()
        self._by_salt.move_to_end(salt)
        return history

    def add(self, seq: Sequence) -> None:
        """Adds a sequence's output to the history of its salt."""
        history = self.of(seq.salt)
        self._num_tokens -= history.num_tokens
        history.add(seq)
        self._num_tokens += history.num_tokens
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Forgets the histories that were not used for the longest time; an empty one counts as a few tokens."""
        while len(self._by_salt) > 1 and self._num_tokens + 64 * len(self._by_salt) > self._most_tokens:
            _, dropped = self._by_salt.popitem(last=False)
            self._num_tokens -= dropped.num_tokens
