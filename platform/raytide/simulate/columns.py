"""Reads named columns from the CSV file of a trace. Other columns and empty lines are ignored."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raytide.core.errors import DataError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    numbers: dict[str, Floats]
    words: dict[str, list[str]]


def read(path: Path, numbers: Sequence[str], words: Sequence[str] = ()) -> Columns:
    """Returns the named columns of a CSV file: `numbers` as floats, `words` as text.

    Raises DataError, which names the line, if a row lacks a column or a number is not finite.
    """
    hint = f"It needs the columns {', '.join((*numbers, *words))}, separated by commas."
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            header = [name.strip() for name in reader.fieldnames or ()]
            missing = [name for name in (*numbers, *words) if name not in header]
            if missing:
                raise DataError(f"{path} has no column {', '.join(missing)}.", hint=hint)
            reader.fieldnames = header
            cells: list[list[float]] = []
            texts: list[list[str]] = []
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                cells.append([_number(row[name], where, name) for name in numbers])
                texts.append([_word(row[name], where, name) for name in words])
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from None
    except (UnicodeDecodeError, csv.Error):
        raise DataError(f"{path} is not a CSV file in UTF-8.", hint=hint) from None
    if not cells:
        raise DataError(f"{path} has no rows.", hint=hint)
    columns = zip(*texts, strict=True) if words else ()
    return Columns(
        dict(zip(numbers, np.array(cells).T, strict=True)),
        {name: list(column) for name, column in zip(words, columns, strict=True)},
    )


def _number(text: str | None, where: str, name: str) -> float:
    word = _word(text, where, name)
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where}: {name} is {word!r}, not a number.", hint="Correct the line, or leave it out.")
    return value


def _word(text: str | None, where: str, name: str) -> str:
    if text is None:
        raise DataError(f"{where}: {name} is missing.", hint="Correct the line, or leave it out.")
    return text
