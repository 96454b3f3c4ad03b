"""How far `LLM.generate` has come: a bar by rich where that is installed, else a line on stderr, written over."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Update", "progress_bar"]

Update = Callable[[int, int], None]  # answers done, tokens made

_EVERY_S = 0.2


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Update]:
    """Yields what to call as often as one likes."""
    if not shown:
        yield lambda done, tokens: None
        return
    has_rich = importlib.util.find_spec("rich") is not None
    with _rich_bar(total) if has_rich else _plain_line(total) as update:
        yield update


@contextmanager
def _rich_bar(total: int) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task, began = bar.add_task("answers", total=total, rate=""), time.monotonic()
        yield lambda done, tokens: bar.update(task, completed=done, rate=_rate(tokens, began))


@contextmanager
def _plain_line(total: int) -> Iterator[Update]:
    began = shown_s = time.monotonic()

    def update(done: int, tokens: int) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s >= _EVERY_S or done == total:
            shown_s = now_s
            sys.stderr.write(f"\ranswers {done}/{total}, {_rate(tokens, began)} ")
            sys.stderr.flush()

    try:
        yield update
    finally:
        sys.stderr.write("\n")


def _rate(tokens: int, began_s: float) -> str:
    return f"{tokens / max(1e-9, time.monotonic() - began_s):,.0f} tokens/s"
