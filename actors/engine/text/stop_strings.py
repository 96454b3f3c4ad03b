"""Cuts a stream of text at the first stop string, even if the stop string spans several chunks. No part of the stop
string is emitted, unless the request asks for the stop string in the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from raytide.actors.engine.sampling_params import SamplingParams


class StopScanner:
    """Emits a stream of text, but holds back the end of the text while it could be the start of a stop string.

    The stream ends as soon as a stop string is complete, however the text is divided into chunks. The first `skip`
    chunks are not scanned. If `include` is true, the stop string itself is emitted. The work per character does not
    depend on the number or length of the stop strings. `stopped_by` is the stop string that ended the stream; until
    then it is "".
    """

    def __init__(self, stop: Sequence[str], *, skip: int = 0, include: bool = False) -> None:
        self._automaton = _automaton(tuple(stop)) if stop else None
        self._state = 0
        self._skip = skip
        self._include = include
        self._held = ""
        self.stopped_by = ""

    @property
    def stopped(self) -> bool:
        return bool(self.stopped_by)

    @classmethod
    def of(cls, params: SamplingParams) -> StopScanner:
        """Makes a scanner for the stop strings of a request. The stream must have one chunk for each token."""
        return cls(params.stop, skip=params.min_tokens, include=params.include_stop_str_in_output)

    def push(self, text: str) -> str:
        """Adds a chunk and returns the text that can be emitted. After a stop string, `stopped` is True and nothing
        more is emitted.
        """
        if self.stopped:
            return ""
        automaton = self._automaton
        if automaton is None:
            return text
        if self._skip:
            self._skip -= 1
            return text
        held, end = self._held + text, len(self._held)
        for char in text:
            self._state = automaton.step(self._state, char)
            end += 1
            if length := automaton.longest[self._state]:
                self.stopped_by, self._held = held[end - length : end], ""
                return held[: end if self._include else end - length]
        cut = len(held) - automaton.depth[self._state]
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """Returns the text that was held back. Call it at the end of the stream."""
        held, self._held = self._held, ""
        return held


def prepare_stops(params: SamplingParams) -> None:
    """Builds and caches the automaton of a request's stop strings, which the scanners of the request share."""
    if params.stop:
        _automaton(tuple(params.stop))


class _Automaton:
    """The Aho-Corasick automaton of all stop strings. A state stands for the longest suffix of the text that is the
    start of a stop string. `depth` is the length of that suffix, `longest` the length of the longest stop string that
    ends there, 0 without one.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        self.longest = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.longest.append(0)
                state = self._next[state][char]
            self.longest[state] = len(stop)
        self._fallback = [0] * len(self._next)
        waiting = deque(self._next[0].values())
        while waiting:  # shorter ones first
            state = waiting.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                self.longest[child] = self.longest[child] or self.longest[self._fallback[child]]
                waiting.append(child)

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)


@lru_cache(maxsize=8)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)
