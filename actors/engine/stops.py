"""Cut a stream of text at the first stop string, even one that straddles chunks, and never emit part of one."""

from __future__ import annotations

from collections.abc import Sequence

from raytide.actors.engine.sampling_params import SamplingParams

__all__ = ["StopScanner"]


class StopScanner:
    """Holds back the shortest tail that could still grow into a stop string; everything before it is safe to emit.

    The first is the one that is complete first, however the text is cut into chunks. The first `skip` chunks are not
    looked at. With `include` the stop string itself is emitted.
    """

    def __init__(self, stop: Sequence[str], *, skip: int = 0, include: bool = False) -> None:
        self._stop = tuple(stop)
        self._skip = skip
        self._include = include
        self._held = ""
        self.stopped = False

    @classmethod
    def of(cls, params: SamplingParams) -> StopScanner:
        """For a stream with one chunk for each token."""
        return cls(params.stop, skip=params.min_tokens, include=params.include_stop_str_in_output)

    def push(self, text: str) -> str:
        """The text that is now safe to emit. After a stop string `stopped` is True and nothing more comes out."""
        if self.stopped:
            return ""
        if not self._stop:
            return text
        if self._skip:
            self._skip -= 1
            return text
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            end, start = min(found)
            return held[: end if self._include else start]
        keep = max(_overlap(held, stop) for stop in self._stop)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """What was held back, once it is known that no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
