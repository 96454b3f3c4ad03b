"""The demo's live view. Each stage of the demo has a line, which shows the stage's current activity. Without a
terminal, the view prints plain lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_PLAIN_EVERY_S = 5.0
_SAME_EVERY_S = 30.0
"""The interval at which an unchanged line is repeated, as a sign that the demo still runs."""


@dataclass(slots=True)
class Stage:
    title: str
    started_s: float = 0.0
    took_s: float | None = None
    detail: str = ""
    failed: bool = False


class View:
    """Shows the stages of the demo on a console: `with view.stage("train") as say: say("step 7 of 60")`."""

    def __init__(self, titles: list[str], console: Console) -> None:
        self._stages = {title: Stage(title) for title in titles}
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._render)
        self._is_live = console.is_terminal
        self._said_s, self._said = 0.0, ""

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._live.stop()

    @contextmanager
    def stage(self, title: str) -> Iterator[Say]:
        stage = self._stages[title]
        stage.started_s = time.monotonic()
        self._plain(f"{title} ...")
        try:
            yield Say(self, stage)
        except BaseException:
            stage.failed = True
            raise
        finally:
            stage.took_s = time.monotonic() - stage.started_s
            self._plain(f"{title}: {stage.detail} ({stage.took_s:.1f} s)")

    def say(self, stage: Stage, detail: str) -> None:
        stage.detail = detail
        line = f"  {detail}"
        if time.monotonic() - self._said_s > (_SAME_EVERY_S if line == self._said else _PLAIN_EVERY_S):
            self._plain(line)

    def _plain(self, line: str) -> None:
        self._said_s, self._said = time.monotonic(), line
        if not self._is_live:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        for stage in self._stages.values():
            grid.add_row(*_row(stage))
        return Group(grid)


class Say:
    """A function that shows the current activity of a stage in the view."""

    def __init__(self, view: View, stage: Stage) -> None:
        self._view, self._stage = view, stage

    def __call__(self, detail: str) -> None:
        self._view.say(self._stage, detail)


def _row(stage: Stage) -> tuple[RenderableType, RenderableType, RenderableType, RenderableType]:
    if not stage.started_s:
        return Text("·", style="dim"), Text(stage.title, style="dim"), Text(""), Text("")
    if stage.took_s is None:
        took = time.monotonic() - stage.started_s
        return Spinner("dots"), Text(stage.title, style="bold"), Text(f"{took:.0f}s"), _line(stage.detail)
    mark = Text("✗", style="red") if stage.failed else Text("✓", style="green")
    return mark, Text(stage.title), Text(f"{stage.took_s:.0f}s", style="dim"), _line(stage.detail, "dim")


def _line(detail: str, style: str = "") -> Text:
    """Returns the first line of a text, which the terminal cuts at its width instead of wrapping it."""
    return Text(detail.partition("\n")[0], style=style, no_wrap=True, overflow="ellipsis")
