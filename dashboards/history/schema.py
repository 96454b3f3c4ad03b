"""The file of the history: its tables, its levels of resolution, and the format in which one row stores points of many
series.

A row holds the points of all series of one metric at one time. Therefore a scrape of thousands of series needs only a
few hundred inserts, and a curve reads only rows of its own metric.
"""

from __future__ import annotations

import sqlite3
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raytide.dashboards.history.points import Row

VERSION = 1
"""The version of the format; a file of another version is replaced."""

SCHEMA = """
CREATE TABLE metrics (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, is_counter INTEGER NOT NULL);
CREATE TABLE series (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    metric INTEGER NOT NULL REFERENCES metrics (id),
    labels TEXT NOT NULL,
    seen_s REAL NOT NULL,
    UNIQUE (metric, labels)
);
CREATE TABLE rows (
    metric INTEGER NOT NULL,
    level INTEGER NOT NULL,
    at_s REAL NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (metric, level, at_s)
) WITHOUT ROWID;
CREATE TABLE times (level INTEGER NOT NULL, at_s REAL NOT NULL, PRIMARY KEY (level, at_s)) WITHOUT ROWID;
CREATE TABLE progress (level INTEGER PRIMARY KEY, until_s REAL NOT NULL);
"""
"""`times` holds the times of the rows, and `progress` the time until which a level is complete. The id of a series is
never reused, so that remaining points of a forgotten series are not attributed to another one.
"""

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the history: a resolution, and how long rows of this resolution are kept."""

    number: int
    step_s: float
    """0 for the points as they were scraped."""
    keep_s: float


def levels(days: float) -> tuple[Level, ...]:
    """Returns the levels of a history that keeps `days` days, the finest first."""
    whole_s = days * _DAY_S
    return (
        Level(0, 0.0, min(4 * 3600.0, whole_s)),
        Level(1, 60.0, min(2 * _DAY_S, whole_s)),
        Level(2, 600.0, whole_s),
    )


def pack(rows: Mapping[int, Row], level: int) -> bytes:
    """Packs rows of one metric into bytes. `rows` maps the id of each series to the series' row. On level 0, a row
    stands for a single point, and only the point's value is stored.
    """
    values = list(rows.values())
    parts: list[array[int] | array[float]] = [array("I", rows), array("d", (row.last for row in values))]
    if level:
        parts.append(array("I", (row.count for row in values)))
        parts += [array("d", (row.sum for row in values)), array("d", (row.max for row in values))]
    if sys.byteorder == "big":
        for part in parts:
            part.byteswap()
    return zlib.compress(b"".join(part.tobytes() for part in parts), 1)


def unpack(data: bytes, level: int) -> Iterator[tuple[int, Row]]:
    """Yields the pairs (series id, row) that `pack` packed. Raises sqlite3.DatabaseError if the bytes are malformed."""
    try:
        raw = zlib.decompress(data)
    except zlib.error as error:
        raise sqlite3.DatabaseError(f"a row is not readable: {error}") from None
    size = 4 + 8 + (4 + 8 + 8 if level else 0)
    if len(raw) % size:
        raise sqlite3.DatabaseError("a row has been cut")
    count, at = len(raw) // size, 0
    parts: list[array[float] | array[int]] = []
    for code, width in (("I", 4), ("d", 8), ("I", 4), ("d", 8), ("d", 8))[: 5 if level else 2]:
        part = array(code, raw[at : at + width * count])
        if sys.byteorder == "big":
            part.byteswap()
        parts.append(part)
        at += width * count
    if level:
        for series, last, number, total, highest in zip(*parts, strict=True):
            yield int(series), Row(int(number), total, last, highest)
    else:
        for series, last in zip(*parts, strict=True):
            yield int(series), Row(1, last, last, last)
