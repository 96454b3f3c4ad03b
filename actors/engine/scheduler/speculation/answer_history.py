"""Earlier answers. If the last tokens of a new answer occur in an earlier answer, the next tokens of the earlier answer
are a guess of how the new answer continues.

The answers are kept separately for each salt of the prefix cache. Otherwise a tenant could learn other tenants'
answers from the speed of its own answers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from raytide.actors.engine.scheduler.speculation.suffix_index import MIN_MATCH, SEPARATOR, Match, SuffixIndex
from raytide.actors.engine.sequence import Sequence

_MOST_TOKENS = 1 << 17
"""The most tokens of all salts together; a token takes about 100 bytes."""
_GENERATION_TOKENS = 1 << 14

Source = Literal["ngram", "answers", "model"]
"""The source of a guess: the request's own prompt and output, earlier answers under its salt, or the draft model."""
SOURCES: tuple[Source, ...] = ("ngram", "answers", "model")

_CLASSES = 8
_KEPT = 0.98
"""The decay of older counts: after 34 further observations of its kind, an observation has half its weight."""
_LOOKUP_PRIORS = (0.25, 0.25, 0.25, 0.4, 0.6, 0.75, 0.75, 0.75)
"""The share of right guesses that is assumed at first, by class of match length: a long match is more reliable."""
_MODEL_PRIOR = 0.7
_PRIOR_WEIGHT = 4.0


def cell_of(source: Source, length: int) -> int:
    """Returns the index of the cell in which guesses are counted. There are cells for each source of guesses. Guesses
    found by lookup are counted by the length of the match (up to 4, 8, 16, 32 and so on). Guesses of the draft model
    are counted by their position in the draft.
    """
    if source == "model":
        return 2 * _CLASSES + min(length, _CLASSES - 1)
    return (_CLASSES if source == "answers" else 0) + min((length - 1).bit_length(), _CLASSES - 1)


class Acceptance:
    """Counts guesses and right guesses. Each source of guesses has separate counts for each range of match lengths.
    Older counts decay.

    A guess is a single token. The next token shows whether the guess was right, so guesses count even if no step
    verified them.

    The second token of a draft matters only if the first token is right. In this case the match is longer by one
    token. The second token is therefore counted under the length of this longer match. The same holds for later
    tokens.
    """

    def __init__(self) -> None:
        self._right = [0.0] * (3 * _CLASSES)
        self._all = [0.0] * (3 * _CLASSES)

    def record(self, cell: int, is_right: bool) -> None:
        self._right[cell] = _KEPT * self._right[cell] + is_right
        self._all[cell] = _KEPT * self._all[cell] + 1.0

    def relax(self, kept: float) -> None:
        """Multiplies the draft model's counts by `kept`. With smaller counts, a draft model that was given up is tried
        again.
        """
        for cell in range(2 * _CLASSES, 3 * _CLASSES):
            self._right[cell] *= kept
            self._all[cell] *= kept

    def share(self, cell: int, prior: float | None = None, weight: float = _PRIOR_WEIGHT) -> float:
        """Returns the estimated share of right guesses in a cell: `(right + weight * prior) / (all + weight)`. `prior`
        is the share that is assumed before any guess, and it counts as much as `weight` guesses.
        """
        if prior is None:
            prior = _MODEL_PRIOR if cell >= 2 * _CLASSES else _LOOKUP_PRIORS[cell % _CLASSES]
        return (self._right[cell] + weight * prior) / (self._all[cell] + weight)


class AnswerHistory:
    """The latest answers to those requests that share one salt of the prefix cache. The class also records how often
    guesses from these answers were right.

    There are two generations of answers. When the younger generation is full, it replaces the older one, which is
    dropped as a whole.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._young, self._old = SuffixIndex([]), SuffixIndex([])

    @property
    def num_tokens(self) -> int:
        return len(self._young.tokens) + len(self._old.tokens)

    def find(self, text: list[int]) -> Match | None:
        """Returns the longest match for the end of a text. Among equally long matches, returns the latest. Returns None
        if nothing matches.
        """
        young, old = self._young.find(text), self._old.find(text)
        if young is None or old is None:
            return young or old
        return old if old.length > young.length else young

    def add(self, seq: Sequence) -> None:
        """Adds the output of a sequence that has ended, preceded by the last tokens of its prompt."""
        first = max(0, seq.prompt_len - MIN_MATCH, len(seq.tokens) - _GENERATION_TOKENS)
        if len(self._young.tokens) + len(seq.tokens) - first > _GENERATION_TOKENS:
            self._young, self._old = SuffixIndex([]), self._young
        self._young.tokens += [*seq.tokens[first:], SEPARATOR]
        self._young.extend()


class AnswerHistories:
    """The answer histories, one for each salt of the prefix cache. Only the most recently used ones are kept."""

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._by_salt: OrderedDict[bytes, AnswerHistory] = OrderedDict()
        self._most_tokens = most_tokens
        self._num_tokens = 0

    def of(self, salt: bytes) -> AnswerHistory:
        """Returns the answer history of a prefix-cache salt. Creates an empty history if there is none."""
        history = self._by_salt.get(salt)
        if history is None:
            history = self._by_salt[salt] = AnswerHistory()
            self._drop_oldest()
        self._by_salt.move_to_end(salt)
        return history

    def add(self, seq: Sequence) -> None:
        """Adds a sequence's output to the history of the sequence's salt."""
        history = self.of(seq.salt)
        self._num_tokens -= history.num_tokens
        history.add(seq)
        self._num_tokens += history.num_tokens
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drops the least recently used histories that exceed the limit; each history counts as 64 tokens more than it
        has.
        """
        while len(self._by_salt) > 1 and self._num_tokens + 64 * len(self._by_salt) > self._most_tokens:
            _, dropped = self._by_salt.popitem(last=False)
            self._num_tokens -= dropped.num_tokens
