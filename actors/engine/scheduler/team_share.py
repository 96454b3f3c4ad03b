"""Limits how much other teams lengthen a step that computes requests of a light team.

A team is light if its load is less than half of its share by weight. In a step that computes tokens of a light team,
the sequences of the other teams take turns. Together, these sequences may lengthen the step by at most a fixed factor.
But they always get at least `decodes of the light teams * weight of the others / weight of the light teams` tokens. If
there is only one team, or no light team, nothing is limited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from raytide.actors.engine.scheduler.policy import SchedulingPolicy
from raytide.actors.engine.sequence import ScheduledChunk, Sequence

_TOKENS_OF_A_PLACE = 256
"""The number of uncomputed prompt tokens that count as much load as one sequence."""
_TOKENS_OF_A_TURN = 8
"""The number of prompt tokens that count as one turn, as a decode does."""


@dataclass(slots=True)
class StepLimit:
    """Limits the tokens that a step may compute for teams that are not light (see TeamShare).

    `grants` has the number of tokens for each running sequence, by sequence id. `admission` is the number of tokens for
    a sequence that starts. Sequences of `light` teams are not limited, nor are sequences that are more urgent than
    `priority`.
    """

    policy: SchedulingPolicy
    light: frozenset[str]
    priority: int
    grants: dict[str, int] = field(default_factory=dict)
    admission: int = 0

    def tokens(self, seq: Sequence, left: int) -> int:
        """Returns how many of the step's `left` tokens a sequence may take."""
        return min(left, self.grants.get(seq.seq_id, 0)) if self.limits(seq) else left

    def limits(self, seq: Sequence) -> bool:
        return seq.team not in self.light and self.policy.priority(seq) >= self.priority

    def admits(self, seq: Sequence) -> bool:
        """Returns whether a waiting sequence may start now."""
        return self.admission > 0 or not self.limits(seq)

    def start(self, seq: Sequence) -> None:
        """Grants the `admission` tokens to a sequence that starts in this step. Does nothing if the sequence is not
        limited.
        """
        if self.limits(seq):
            self.grants[seq.seq_id], self.admission = self.admission, 0


class TeamShare:
    """Divides steps between light teams and the other teams. The load of a light team is less than half of its share.
    The object records which teams have unfinished sequences, and how many tokens the other teams may still take.

    `seconds(rows)` returns the time of a step of `rows` tokens, in any unit. In a step that serves light teams, the
    tokens of the other teams may make the step up to `slowdown` times as long as it would be without them. The other
    teams may lengthen the step further if their weight guarantees them more tokens.
    """

    def __init__(self, policy: SchedulingPolicy, slowdown: float, seconds: Callable[[int], float]) -> None:
        self._policy, self._slowdown, self._seconds = policy, slowdown, seconds
        self._sequences: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._due = 0.0  # tokens for limited sequences
        # Of the last step: those that lacked a block, for whose sake nobody is kept out, and whether a token was kept
        # for one to start with, and none could.
        self._stalled: set[str] = set()
        self._is_admission_stuck = False

    @property
    def is_contested(self) -> bool:
        return len(self._sequences) > 1

    def enter(self, seq: Sequence) -> None:
        self._sequences[seq.team] += 1
        self._weights[seq.team] = seq.weight

    def leave(self, seq: Sequence) -> None:
        self._sequences[seq.team] -= 1
        if not self._sequences[seq.team]:
            del self._sequences[seq.team], self._weights[seq.team]

    def light_teams(self, running: Items[Sequence], head: Sequence | None) -> frozenset[str]:
        """Returns the teams whose load is less than half of their share. `head` is the waiting sequence that is served
        next.
        """
        load = {team: float(count) for team, count in self._sequences.items()}
        for seq in running if head is None else (*running, head):
            load[seq.team] += (seq.num_pending - 1) / _TOKENS_OF_A_PLACE
        fair = sum(load.values()) / sum(self._weights.values())
        return frozenset(team for team, each in load.items() if 2 * each < fair * self._weights[team])

    def limit(
        self,
        running: Items[Sequence],
        light: frozenset[str],
        *,
        started: Items[ScheduledChunk],
        left: int,
        may_admit: bool,
    ) -> StepLimit | None:
        """Returns the limit of a step. Returns None if the step computes no tokens for light teams.

        `started` are the prompt chunks of the light teams' sequences that start in this step. `left` is the budget
        that remains after the decodes of `running`. `may_admit` is True if a sequence waits and there is a free
        place to run it.
        """
        working = [seq for seq in running if seq.team in light and seq.seq_id not in self._stalled]
        decodes = sum(seq.num_pending == 1 for seq in working)
        prompt_tokens = sum(chunk.length for chunk in started)
        prompt_tokens += min(left, sum(seq.num_pending for seq in working if seq.num_pending > 1))
        if not decodes + prompt_tokens:
            return None
        urgent = min(self._policy.priority(seq) for seq in (*working, *(chunk.seq for chunk in started)))
        limit = StepLimit(self._policy, light, urgent)
        limited = [seq for seq in running if limit.limits(seq)]
        most = left + sum(seq.num_pending == 1 for seq in limited)
        ratio = self._weight(light, is_light=False) / self._weight(light, is_light=True)
        gain = max(self._affordable(decodes + prompt_tokens, most), decodes * ratio)
        self._due = min(self._due + gain, gain + 1.0)
        tokens = int(self._due)
        reserved = min(tokens, int(may_admit and not self._is_admission_stuck))
        granted = self._grant(limit, limited, tokens - reserved)
        self._due -= granted
        limit.admission = tokens - granted
        return limit

    def observe(self, limit: StepLimit | None, stalled: set[str], started: Items[ScheduledChunk]) -> None:
        """Records which sequences of a step lacked a block, and whether the tokens of `limit.admission` remained
        unused.
        """
        self._stalled = stalled
        tokens = sum(chunk.length for chunk in started if limit is not None and limit.limits(chunk.seq))
        self._due -= tokens
        self._is_admission_stuck = limit is not None and limit.admission > 0 and not tokens

    def _grant(self, limit: StepLimit, limited: Items[Sequence], tokens: int) -> int:
        """Grants tokens to limited sequences, those with the fewest turns so far first; returns how many it granted."""
        lowest = min((seq.turns for seq in limited if seq.turns >= 0.0), default=0.0)
        for seq in limited:
            seq.turns = max(seq.turns, lowest)
        left = tokens
        for seq in sorted(limited, key=lambda seq: (seq.turns, seq.rank)):
            if left <= 0:
                break
            length = min(left, seq.num_pending)
            limit.grants[seq.seq_id] = length
            seq.turns += 1.0 if seq.num_pending == 1 else length / _TOKENS_OF_A_TURN
            left -= length
        return tokens - left

    def _affordable(self, rows: int, most: int) -> float:
        """Returns how many more rows, at most `most`, lengthen a step of `rows` to `slowdown` times its time."""
        low, low_s = 0, self._seconds(rows)
        allowed_s, size = self._slowdown * low_s, 1
        while low < most:
            high = min(most, size)
            high_s = self._seconds(rows + high)
            if high_s > allowed_s:
                return low + (high - low) * max(0.0, allowed_s - low_s) / (high_s - low_s)
            low, low_s, size = high, high_s, 2 * size
        return float(most)

    def _weight(self, light: frozenset[str], *, is_light: bool) -> float:
        return sum(weight for team, weight in self._weights.items() if (team in light) == is_light)
