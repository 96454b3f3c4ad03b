"""The share of guesses that are right, by their source and the length of the match that they come from.

A guess is a single token, so whether it would have been right is known as soon as the token is there, computed along or
not: what is never tried is learned about all the same. The second token of a draft counts as a guess whose match is
longer by one, and so on; that is the condition under which it is looked at.
"""

from __future__ import annotations

from typing import Literal

Source = Literal["ngram", "answers", "model"]
"""The request's own prompt and output, earlier answers under its salt, or the draft model."""
SOURCES: tuple[Source, ...] = ("ngram", "answers", "model")

_CLASSES = 8
_KEPT = 0.98
"""An observation weighs half after 34 others of its kind."""
_LOOKUP_PRIORS = (0.25, 0.25, 0.25, 0.4, 0.6, 0.75, 0.75, 0.75)
"""The share that is assumed before guesses were seen, by class of length: a long match says more than a short one."""
_MODEL_PRIOR = 0.7
_PRIOR_WEIGHT = 4.0


def cell_of(source: Source, length: int) -> int:
    """Returns the index of a kind of guess: lengths up to 4, 8, 16, 32 and above; for a model each position."""
    if source == "model":
        return 2 * _CLASSES + min(length, _CLASSES - 1)
    return (_CLASSES if source == "answers" else 0) + min((length - 1).bit_length(), _CLASSES - 1)


class Acceptance:
    """Decayed counts of guesses and right ones."""

    def __init__(self) -> None:
        self._right = [0.0] * (3 * _CLASSES)
        self._all = [0.0] * (3 * _CLASSES)

    def record(self, cell: int, is_right: bool) -> None:
        self._right[cell] = _KEPT * self._right[cell] + is_right
        self._all[cell] = _KEPT * self._all[cell] + 1.0

    def relax(self, kept: float) -> None:
        """Forgets a part of what is known about the draft model, so that one that was given up is tried again."""
        for cell in range(2 * _CLASSES, 3 * _CLASSES):
            self._right[cell] *= kept
            self._all[cell] *= kept

    def share(self, cell: int, prior: float | None = None, weight: float = _PRIOR_WEIGHT) -> float:
        """Returns the share of right guesses, beside `weight` guesses of which the share `prior` was right."""
        if prior is None:
            prior = _MODEL_PRIOR if cell >= 2 * _CLASSES else _LOOKUP_PRIORS[cell % _CLASSES]
        return (self._right[cell] + weight * prior) / (self._all[cell] + weight)
