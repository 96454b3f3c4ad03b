"""Cut a stream of text at the first stop string, even one that straddles chunks, and never emit part of one."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopScanner"]


class StopScanner:
    """Holds back the shortest tail that could still grow into a stop string; everything before it is safe to emit."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is now safe to emit. After a stop string `stopped` is True and nothing more comes out."""
        if self.stopped:
            return ""
        if not self._stop:
            return text
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)]
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
