"""The output of commands: JSON on request, a table on a terminal, tab-separated values in a pipe."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from raytide.core.bounds import printable
from raytide.core.errors import UsageError

R = TypeVar("R")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_LEAST_ROOM = 30
"""The least width in characters of a column of words; a narrower column is printed below its row."""
_BELOW = 6
ClusterName = Annotated[str | None, typer.Option("--cluster", help="The cluster's name; `local` by default.")]


def check_folder(*paths: Path | None) -> None:
    """Raises UsageError if the folder of a file that is written at the end does not exist."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise UsageError(
                f"there is no folder {path.parent} for {path.name}.", hint="Make it, or name another file."
            )


def as_json(value: Any) -> None:
    """Prints a value as JSON. Records inside the value are printed in the form in which the API sends them."""
    print(json.dumps(value, indent=2, default=_plain))


def _plain(value: object) -> object:
    from pydantic import BaseModel

    from raytide.control.views import to_json

    return to_json(value) if is_dataclass(value) or isinstance(value, BaseModel) else str(value)


def as_result(value: Any, text: str, is_json: bool) -> None:
    """Prints the result of a command: `value` as JSON if that is requested, otherwise `text`."""
    if is_json:
        as_json(value)
    else:
        print(text)


def as_list(
    records: Sequence[R],
    columns: Sequence[str],
    row: Callable[[R], Sequence[object]],
    is_json: bool,
    *,
    height: int = 0,
) -> None:
    """Prints records as JSON, or as a table. `row` returns the table's row for a record."""
    if is_json:
        as_json(records)
    else:
        as_table(columns, map(row, records), height=height)


def as_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, height: int = 0) -> None:
    """Prints a table. On a terminal it is aligned and has at most `height` lines (0 means all). In a pipe it is
    tab-separated.
    """
    shown = [[printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        print("\n".join(fitted(columns, shown, shutil.get_terminal_size().columns)[: height or None]))
        return
    for row in [columns, *shown]:
        print("\t".join(row))


def local_time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def as_lines(lines: Iterable[str], *, indent: int) -> None:
    """Prints the lines. On a terminal, long lines are wrapped, and continuations begin at column `indent`."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in lines:
        print("\n".join(_wrapped(line, width, indent)) if len(line) > width > 0 else line)


def fitted(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Returns the lines of a table that fits the width.

    If the table is too wide, columns that are empty in every row are left out. If it is still too wide, the last column
    is wrapped. If the last column would become too narrow, it is printed below its row.
    """
    table = [[cell.replace("\n", " ") for cell in row] for row in [columns, *rows]]
    if _width(table) > width:
        last = len(columns) - 1
        kept = [at for at in range(last + 1) if at in (0, last) or any(row[at] not in ("", "-") for row in table[1:])]
        table = [[row[at] for at in kept] for row in table]
    if _width(table) <= width:
        return _aligned(table)
    heads = _aligned([row[:-1] for row in table])
    before = _width([row[:-1] for row in table]) + 2
    if width - before >= _LEAST_ROOM:
        joined = (f"{head:{before}}{row[-1]}".rstrip() for head, row in zip(heads, table, strict=True))
        return [line for row in joined for line in _wrapped(row, width, before)]
    below: list[list[str]] = [
        [],
        *(_wrapped(" " * _BELOW + row[-1], width, _BELOW) if row[-1] else [] for row in table[1:]),
    ]
    return [line for head, words in zip(heads, below, strict=True) for line in (head, *words)]


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def _width(table: Sequence[Sequence[str]]) -> int:
    return max(map(len, _aligned(table)))


def _wrapped(line: str, width: int, indent: int) -> list[str]:
    """Returns the line wrapped at spaces: long words such as addresses and paths stay whole."""
    return textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ) or [""]
