"""Live views: in a notebook in place, on a terminal with rich, and silent elsewhere."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from raytide.sdk import display
from raytide.sdk.display import Glance, LiveView, sparkline

GLANCE = Glance(
    "train tiny (job-1)", 30, 120, {"state": "running", "loss": "<2.5>"}, {"loss": (3.0, 2.5)}, lambda: "<svg></svg>"
)


def never() -> Glance:
    raise AssertionError("nobody sees it")


def test_nothing_is_shown_where_output_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with LiveView() as live:
        live.show(never)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_progress_and_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with LiveView() as live:
        live.show(lambda: GLANCE)
    shown = terminal.getvalue()
    assert "train tiny (job-1)" in shown and "25%" in shown and "█▁" in shown and "<2.5>" in shown


def test_what_is_over_is_not_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "is_notebook", lambda: True)
    with LiveView(is_shown=False) as live:
        live.show(never)


def test_a_notebook_updates_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def first(what: str, *, display_id: bool) -> Any:
        assert display_id
        return SimpleNamespace(update=shown.append)

    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=first))
    with LiveView() as live:
        for _ in range(100):
            live.show(lambda: GLANCE)
    assert 1 <= len(shown) < 100, "what comes too fast is skipped, but for the last"
    assert '<progress value="30" max="120">' in shown[-1] and "&lt;2.5&gt;" in shown[-1] and "<svg></svg>" in shown[-1]


def test_a_shell_without_a_kernel_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(config={"TerminalIPythonApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert not display.is_notebook()


def test_a_glance_without_an_end_pulses() -> None:
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        console.print(Glance("data text", facts={"stage": "encode"}).as_rich())
    assert "data text" in captured.get() and "%" not in captured.get()
    assert "<progress value" not in Glance("data text").as_html()


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300), st.integers(1, 80))
@example([0.0, 2.2e-309], 1)
@example([-1.7e308, 0.0, 1.7e308], 3)
@example([0.0, 5e-324], 2)
def test_a_sparkline_is_as_wide_as_it_may_be(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    assert len(line.partition("  ")[0]) == min(width, len(finite))
    assert bool(line) == bool(finite)
