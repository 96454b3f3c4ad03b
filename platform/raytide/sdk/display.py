"""Live views of jobs and endpoints. On a terminal, rich draws them. In a notebook, they are updated in place.
Elsewhere, nothing is shown.

This module recognises notebooks by the same test as `tqdm.auto`. On a terminal, views are written to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from raytide.core.io import html

if TYPE_CHECKING:
    from rich.console import RenderableType

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 60
_BAR_WIDTH = 40
_EVERY_S = 0.5
"""The least time between two glances, in seconds."""


@dataclass(frozen=True, slots=True)
class Glance:
    """The state of a running job or endpoint at one moment, in the form in which a live view displays it."""

    title: str
    done: float = 0.0
    total: float = 0.0
    """The value of `done` at the end; 0 if it is not known."""
    facts: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The values of each curve so far, by the curve's name, for a terminal."""
    picture: Callable[[], str] | None = None
    """Returns a picture of the same curves, for a notebook."""

    def as_html(self) -> str:
        share = f" {self.done / self.total:.0%}" if self.total else ""
        progress = f"<p>{html.bar(min(self.done, self.total), self.total)}{share}</p>" if self.total else ""
        drawn = self.picture() if self.picture is not None else ""
        return html.framed(html.table(self.title, ("", ""), self.facts.items()), progress, drawn)

    def as_rich(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self.total or None, completed=self.done, width=_BAR_WIDTH, pulse=not self.total)
        share = f"{self.done / self.total:.0%}" if self.total else ""
        head.add_row(Text(self.title, style="bold"), bar, share)
        facts = Text("  ".join(f"{name} {value}" for name, value in self.facts.items()), style="dim")
        lines = [Text(f"{name:>14}  {sparkline(values)}") for name, values in self.curves.items() if values]
        return Group(head, facts, *lines)


class LiveView:
    """Displays a sequence of glances, each in place of the previous one: `with LiveView() as live:
    live.show(run.glance)`.
    """

    def __init__(self, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._live: Any = None
        self._notebook: Any = None
        self._handle: Any = None
        self._shown_s = 0.0
        self._pending: Callable[[], Glance] | None = None

    def __enter__(self) -> Self:
        if not self._is_shown:
            return self
        if is_notebook():
            self._notebook = import_module("IPython.display")
            self._handle = self._notebook.display(self._notebook.HTML(""), display_id=True)
        elif sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pending is not None and error is None:
            self._draw(self._pending())
        if self._live is not None:
            self._live.stop()

    def show(self, look: Callable[[], Glance]) -> None:
        """Displays the glance that `look` returns. `look` is called only when the display is redrawn."""
        if self._live is None and self._handle is None:
            return
        self._pending = look
        if time.monotonic() - self._shown_s >= _EVERY_S:
            self._draw(look())

    def _draw(self, glance: Glance) -> None:
        self._shown_s, self._pending = time.monotonic(), None
        if self._handle is not None:
            self._handle.update(self._notebook.HTML(glance.as_html()))
        else:
            self._live.update(glance.as_rich())


def is_notebook() -> bool:
    """Returns True if this process is a Jupyter kernel, by the same rule as `tqdm.auto`."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Draws the values as a line of blocks. Appends the last value and the range (smallest to largest)."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    count = min(width, len(finite))
    picked = [finite[at * (len(finite) - 1) // max(1, count - 1)] for at in range(count)]
    span = high / 2 - low / 2  # halves, since the difference of two floats may not be one
    shares = [(value / 2 - low / 2) / span if span > 0 else 0.0 for value in picked]
    line = "".join(_BLOCKS[int(share * (len(_BLOCKS) - 1))] for share in shares)
    return f"{line}  {finite[-1]:.4g}  ({low:.4g} to {high:.4g})"
