"""Decides in each step how many tokens to guess for which sequences.

A guess is verified if the verification lowers the expected time per token. This time is estimated from the measured
cost of a row, and from the share of such guesses that were right. Speculation therefore adapts to the model, the
device, the load and the text, and stops by itself if guesses do not pay.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytide.actors.engine.scheduler.speculation.answer_history import (
    SOURCES,
    Acceptance,
    AnswerHistories,
    AnswerHistory,
    Source,
    cell_of,
)
from raytide.actors.engine.scheduler.speculation.suffix_index import Match, SuffixIndex
from raytide.actors.engine.scheduler.step_cost import StepCost
from raytide.actors.engine.sequence import ScheduledChunk, Sequence, StepPlan
from raytide.actors.engine.types import DraftCounts

if TYPE_CHECKING:
    from raytide.actors.engine.model.draft_model import DraftModel

_log = logging.getLogger(__name__)

MAX_DRAFT = 16
_LEAST_GAIN = 0.03
"""The least share of the time per token that guesses must save."""
_LEAST_SURVIVAL = 0.05
_HISTORY_WEIGHT = 8.0
"""The statistics under a request's salt weigh as much as this many guesses of the request itself."""
_PATIENCE, _EVERY, _MANY = 8, 4, 8
"""After _PATIENCE steps without a draft, steps with _MANY decodes or more look for drafts only every _EVERY-th time,
because lookups for so large a batch take long.
"""
_MODEL_DRAFT = 8
_MOST_CATCH_UP = 4
"""The draft model guesses for a sequence only if it has to catch up with at most this many tokens for each token that
the sequence may still get.
"""
_MODEL_KEPT = 0.9
"""The share of the draft model's counts that each new request keeps."""
_INDEXED_TOKENS = 1 << 15
"""The number of a prompt's last tokens that are indexed for lookups; a token takes about 100 bytes. One step indexes at
most this many of all prompts: indexing each sample of one long prompt would take a second.
"""


@dataclass(slots=True)
class _Proposal:
    """A draft and, for each of its tokens, the probability that it and all before it are right."""

    source: Source
    tokens: list[int]
    survival: list[float]


class _Guesser:
    """The guesses for one sequence, and how often they were right."""

    def __init__(self, seq: Sequence, sources: Collection[Source], history: AnswerHistory) -> None:
        self._history = history
        self._own = Acceptance()
        self._index = SuffixIndex(seq.tokens, max(0, len(seq.tokens) - _INDEXED_TOKENS))
        self._matches: dict[Source, Match | None] = {source: None for source in sources if source != "model"}
        self._known = len(seq.tokens)
        self.model_draft: list[int] = []  # of the last step

    def update(self, seq: Sequence) -> None:
        """Compares the guesses with the sequence's new tokens and counts the right ones. After a wrong guess it looks
        for a new match.
        """
        for token in seq.tokens[self._known :]:
            for source, match in self._matches.items():
                if match is not None:
                    cell = cell_of(source, match.length)
                    is_right = match.follow(token)
                    self.record(cell, is_right)
                    if not is_right:
                        self._matches[source] = None
        for at, (guess, token) in enumerate(zip(self.model_draft, seq.tokens[self._known :], strict=False)):
            self.record(cell_of("model", at), guess == token)
            if guess != token:
                break
        self.model_draft = []
        self._known = len(seq.tokens)
        self._index.extend()
        for source, match in self._matches.items():
            if match is None:
                self._matches[source] = (self._index if source == "ngram" else self._history).find(seq.tokens)

    def record(self, cell: int, is_right: bool) -> None:
        self._own.record(cell, is_right)
        self._history.acceptance.record(cell, is_right)

    def proposal(self, most: int) -> _Proposal | None:
        """Returns the draft of at most `most` tokens with the most expected right ones; None without a match."""
        best: _Proposal | None = None
        for source, match in self._matches.items():
            if match is not None and (draft := match.draft(most)):
                survival = self.survival(source, match.length, len(draft))
                found = _Proposal(source, draft[: len(survival)], survival)
                if best is None or sum(found.survival) > sum(best.survival):
                    best = found
        return best

    def survival(self, source: Source, length: int, count: int) -> list[float]:
        """Returns the probabilities that the first guess, the first two guesses, and so on, are all right, as far as
        they are worth a try.
        """
        survival, alive, last_cell, share = list[float](), 1.0, -1, 0.0
        for at in range(count):
            cell = cell_of(source, length + at)
            if cell != last_cell:
                last_cell = cell
                share = self._own.share(cell, self._history.acceptance.share(cell), _HISTORY_WEIGHT)
            alive *= share
            if alive < _LEAST_SURVIVAL:
                break
            survival.append(alive)
        return survival


class Speculator:
    """Drafts tokens for decoding sequences, and counts drafts and right guesses by source.

    `allowed(seq, draft)` returns the length of the longest beginning of the draft that the sequence's grammar
    allows, in tokens. If there is a draft model, it guesses only for sequences that get no draft from a lookup.
    """

    def __init__(
        self,
        sources: Collection[Source],
        allowed: Callable[[Sequence, list[int]], int],
        *,
        cost: StepCost | None = None,
        model: DraftModel | None = None,
    ) -> None:
        self._sources, self._allowed = sources, allowed
        self._cost = cost or StepCost()
        self._model = model
        self._fruitless = 0  # steps since the last draft
        self._indexable = 0  # prompt tokens left in this step
        self._guessers: dict[str, _Guesser] = {}
        self._histories = AnswerHistories()
        self._drafted: dict[str, Source] = {}  # in this step, by sequence
        self._counts = {source: [0, 0, 0] for source in SOURCES if source in sources}

    @classmethod
    def of(
        cls,
        option: str,
        allowed: Callable[[Sequence, list[int]], int],
        cost: StepCost,
        model: DraftModel | None,
    ) -> Speculator | None:
        """Returns the speculator for the engine's option `speculation`, or None if the option is "off"."""
        if option == "off":
            return None
        sources: tuple[Source, ...] = ("ngram",) if option == "ngram" else ("ngram", "answers")
        return cls((*sources, "model") if model else sources, allowed, cost=cost, model=model)

    @property
    def counts(self) -> tuple[DraftCounts, ...]:
        return tuple(DraftCounts(source, *counts) for source, counts in self._counts.items())

    def add_drafts(
        self, decodes: Items[ScheduledChunk], num_tokens: int, budget: int, reserve: Callable[[Sequence, int], int]
    ) -> None:
        """Adds drafts to the decodes of a step, but only where the drafts are expected to save time.
        `Drafter.add_drafts` describes the parameters.
        """
        self._drafted.clear()
        self._fruitless += 1
        if self._fruitless > _PATIENCE and len(decodes) >= _MANY and self._fruitless % _EVERY:
            return
        most = min(MAX_DRAFT, budget)
        if not self._may_pay(num_tokens, len(decodes), min(budget, most * len(decodes))):
            return
        self._indexable = _INDEXED_TOKENS
        slots: list[tuple[float, int]] = []  # survival, and the decode that the slot is for
        proposals: dict[int, _Proposal] = {}
        for place, chunk in enumerate(decodes):
            proposal = self._propose(chunk.seq, most) if chunk.seq.output_len else None
            if proposal is not None:
                proposals[place] = proposal
                slots += [(survival, place) for survival in proposal.survival]
        slots.sort(key=lambda slot: -slot[0])
        looked_up = slots[: self._best_count(slots[:budget], num_tokens, len(decodes))]
        chosen = Counter(place for _, place in looked_up)
        if self._model is not None:
            known = [place for place, chunk in enumerate(decodes) if chunk.seq.seq_id in self._guessers]
            others = [decodes[place] for place in known if not chosen[place]]
            likely = [survival for survival, _ in looked_up]
            self._ask_model(others, num_tokens, len(decodes), likely, budget - len(looked_up), reserve)
        for place, wanted in chosen.items():
            seq, proposal = decodes[place].seq, proposals[place]
            count = reserve(seq, wanted)
            if count > 0:
                decodes[place].add_draft(proposal.tokens[:count])
                self._drafted[seq.seq_id] = proposal.source
        if self._drafted:
            self._fruitless = 0

    def observe(self, plan: StepPlan, accepted: Callable[[str], int]) -> None:
        """Counts the drafts of a computed step. `accepted(seq_id)` returns how many of a sequence's draft tokens were
        right.
        """
        for chunk in plan.chunks:
            if chunk.draft and (source := self._drafted.get(chunk.seq.seq_id)) is not None:
                counts = self._counts[source]
                counts[0] += 1
                counts[1] += len(chunk.draft)
                counts[2] += accepted(chunk.seq.seq_id)

    def forget(self, seq: Sequence) -> None:
        """Stops guessing for a sequence. If earlier answers are a source of guesses, the sequence's output is kept for
        later sequences with the same prefix-cache salt.
        """
        self._guessers.pop(seq.seq_id, None)
        if "answers" in self._sources and seq.output_len:
            self._histories.add(seq)

    def _ask_model(
        self,
        chunks: list[ScheduledChunk],
        num_tokens: int,
        decodes: int,
        likely: list[float],
        budget: int,
        reserve: Callable[[Sequence, int], int],
    ) -> None:
        """Lets the draft model guess for these decodes, as many tokens as lower the time per token further. `likely`
        has the probabilities that the step's other guesses are right.
        """
        model = self._model
        assert model is not None
        wanted = [
            chunk
            for chunk in chunks
            if model.num_missing(chunk.seq) <= _MOST_CATCH_UP * (chunk.seq.max_len - len(chunk.seq.tokens))
        ]
        if not wanted:
            return
        survival = [self._guessers[chunk.seq.seq_id].survival("model", 0, _MODEL_DRAFT) for chunk in wanted]
        right = sum(likely)
        best, best_depth = self._enough(decodes), 0
        if likely:
            best = self._time_per_token(num_tokens, decodes, len(likely), right)
        for depth in range(1, _MODEL_DRAFT + 1):
            count = depth * len(wanted)
            if count > budget:
                break
            expected = right + sum(sum(each[:depth]) for each in survival)
            drafting_s = depth * model.seconds(len(wanted)) / (decodes + expected)
            time = self._time_per_token(num_tokens, decodes, len(likely) + count, expected) + drafting_s
            if time < best:
                best, best_depth = time, depth
        if not best_depth:
            return
        counts = [reserve(chunk.seq, best_depth) for chunk in wanted]
        try:
            drafts = model.draft([chunk.seq for chunk in wanted], counts)
        except Exception:  # the answers do not need it
            _log.exception("the draft model fails, and is not asked again")
            self._model = None
            return
        for chunk, draft in zip(wanted, drafts, strict=True):
            seq = chunk.seq
            if seq.grammar is not None:
                draft = draft[: self._allowed(seq, draft)]
            if draft:
                chunk.add_draft(draft)
                self._guessers[seq.seq_id].model_draft = draft
                self._drafted[seq.seq_id] = "model"

    def _propose(self, seq: Sequence, most: int) -> _Proposal | None:
        guesser = self._guessers.get(seq.seq_id)
        if guesser is None:
            size = min(len(seq.tokens), _INDEXED_TOKENS)
            if size > self._indexable:
                return None
            self._indexable -= size
            history = self._histories.of(seq.salt)
            history.acceptance.relax(_MODEL_KEPT)
            guesser = self._guessers[seq.seq_id] = _Guesser(seq, self._sources, history)
        guesser.update(seq)
        proposal = guesser.proposal(min(most, seq.max_len - len(seq.tokens) - 1))
        if proposal is not None and seq.grammar is not None:
            allowed = self._allowed(seq, proposal.tokens)
            del proposal.tokens[allowed:], proposal.survival[allowed:]
        return proposal

    def _may_pay(self, num_tokens: int, decodes: int, most: int) -> bool:
        """Returns whether guesses would pay even if all of them were right. If not, for instance because more rows
        would slow the step too much, no guess is made.
        """
        enough = self._enough(decodes)
        counts = {min(count, most) for count in (1, 4, decodes, 4 * decodes, most)}
        return any(self._time_per_token(num_tokens, decodes, count, count) < enough for count in counts)

    def _best_count(self, slots: list[tuple[float, int]], num_tokens: int, decodes: int) -> int:
        """Returns how many of the slots, starting with the likeliest, give the lowest time per token; 0 if none lowers
        it enough.
        """
        best, best_count, right = self._enough(decodes), 0, 0.0
        stride = 1 + decodes // 8
        for count, (survival, _) in enumerate(slots, 1):
            right += survival
            if count % stride == 0 or count == len(slots):
                time = self._time_per_token(num_tokens, decodes, count, right)
                if time < best:
                    best, best_count = time, count
        return best_count

    def _enough(self, decodes: int) -> float:
        """Returns the time per token below which guesses pay."""
        return (1 - _LEAST_GAIN) * self._cost.seconds(decodes) / decodes

    def _time_per_token(self, num_tokens: int, decodes: int, count: int, right: float) -> float:
        """Returns the expected seconds per token with `count` more guesses, of which `right` are right. The prompts'
        part of the step is left out, because it is computed anyway.
        """
        cost = self._cost
        more_s = cost.seconds(num_tokens + count) - cost.seconds(num_tokens)
        return (cost.seconds(decodes) + more_s) / (decodes + right)
