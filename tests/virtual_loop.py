"""An event loop whose time passes only while everything waits, and then at once: timings are exact and take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits for ever"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run_virtually(body: Coroutine[None, None, T]) -> T:
    """Runs a coroutine that uses no sockets and no threads."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(body)
