"""Renders objects as HTML for notebooks, in one style that is readable on light and dark backgrounds. All texts are
escaped.

The style takes its colours from the surrounding text. Every rendered object contains the style, because a notebook
shows each object separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from html import escape
from typing import Any, TypeVar

from raytide.core.money import format_usd

T = TypeVar("T")

STYLE = (
    "<style>.raytide{font:13px/1.45 system-ui,sans-serif;color:inherit;max-width:100%;overflow-x:auto;margin:4px 0}"
    ".raytide table{border-collapse:collapse;margin:0;border:0;font-variant-numeric:tabular-nums}"
    ".raytide caption{caption-side:top;text-align:left;font-weight:600;padding:2px 8px 6px 0;color:inherit;"
    "white-space:nowrap}"
    ".raytide th,.raytide td{text-align:left;vertical-align:top;padding:3px 16px 3px 0;border:0;background:none;"
    "white-space:pre-wrap;max-width:60em}"
    ".raytide thead th{font-weight:500;opacity:.65;border-bottom:1px solid rgba(128,128,128,.45)}"
    ".raytide tbody tr+tr>td{border-top:1px solid rgba(128,128,128,.18)}"
    ".raytide tbody tr:nth-child(n){background:none}.raytide .muted{opacity:.65}"
    ".raytide progress{width:16em;height:.8em;vertical-align:middle;accent-color:#3b82f6}</style>"
)
_MOST_ROWS = 200
_MOST_CELL = 2000


class ShownAsHtml:
    """A dataclass or Config that notebooks show as a table of its fields, with units."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return framed(table(type(self).__name__, ("", ""), pairs_of(self)))


class ShownList(list[T]):
    """A list that notebooks show as a table. Otherwise it behaves as a list."""

    def __init__(
        self, items: Iterable[T], title: str, columns: Sequence[str], row_of: Callable[[T], Sequence[object]]
    ) -> None:
        super().__init__(items)
        self._title, self._columns, self._row_of = title, columns, row_of

    def _repr_html_(self) -> str:
        return framed(table(self._title, self._columns, (self._row_of(item) for item in self)))


class ShownText(str):
    """A text that notebooks show as prose, without quotation marks. Otherwise it behaves as a string."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return framed(f"<p>{escape(self)}</p>")


def framed(*parts: str) -> str:
    """Returns the parts as one HTML element in the common style."""
    return f'<div class="raytide">{STYLE}{"".join(parts)}</div>'


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns an HTML table. It shows at most 200 rows, and the number of the other rows. If all column names are
    empty, the table has no header."""
    found = list(rows)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text_of(cell)[:_MOST_CELL])}</td>" for cell in row) + "</tr>"
        for row in found[:_MOST_ROWS]
    )
    if not found:
        body = f'<tr><td class="muted" colspan="{max(1, len(columns))}">none</td></tr>'
    elif len(found) > _MOST_ROWS:
        body += f'<tr><td class="muted" colspan="{len(columns)}">and {len(found) - _MOST_ROWS:,} more</td></tr>'
    thead = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f"<table><caption>{escape(title)}</caption>{thead}<tbody>{body}</tbody></table>"


def bar(done: float, total: float) -> str:
    """Returns an HTML progress bar that shows `done` of `total`."""
    return f'<progress value="{done:g}" max="{total:g}">{done:g} of {total:g}</progress>'


def pairs_of(value: object) -> list[tuple[str, str]]:
    """Returns the name and the value of each field of a dataclass or Config, as texts. A unit such as seconds is
    removed from the name and shown with the value."""
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
    else:
        names = list(getattr(type(value), "model_fields", ()))
    return [_pair(name, getattr(value, name)) for name in names]


def text_of(value: Any) -> str:
    """Returns a value as a short text. An empty value becomes `-`."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text_of(each)}" for key, each in value.items()) or "-"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(text_of(each) for each in value) or "-"
    if is_dataclass(value) or hasattr(type(value), "model_fields"):
        return ", ".join(f"{name}: {text}" for name, text in pairs_of(value) if text != "-") or "-"
    return str(value)


def _pair(name: str, value: Any) -> tuple[str, str]:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        return _spaced(name), text_of(value)
    label, money, per = name.partition("_micro_usd")
    if money:
        return _spaced(label), "-" if value is None else format_usd(int(value)) + ("/h" if per else "")
    if name == "at_s" or name.endswith("_at_s"):
        at = "-" if value is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
        return _spaced(name.removesuffix("_s")), at
    if name.endswith("_s"):
        return _spaced(name.removesuffix("_s")), "-" if value is None else f"{value:,.6g} s"
    return _spaced(name), text_of(value)


def _spaced(name: str) -> str:
    return name.replace("_", " ")
