"""Output: JSON when asked, a table on a terminal, tab-separated values in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ClusterName = Annotated[str | None, typer.Option("--cluster", help="Which cluster; `local` when left out.")]


def as_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def as_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            print("\t".join(str(cell) for cell in row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table)
