"""Writes the history, with one transaction for each scrape. Limits on series and bytes hold for every input.

A file that cannot be read is replaced by an empty one, because new values matter more than old ones. The attribute
`problem` then describes this to the operator.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from raytide.core.logs import logger
from raytide.dashboards.history.points import Labels, Row, downsampled
from raytide.dashboards.history.schema import SCHEMA, VERSION, Level, levels, pack, unpack

FILE = "history.sqlite"
"""The file's name in the run folder."""
MOST_SERIES = 20_000
MOST_BYTES = 256 << 20
"""The largest size of the file. The write-ahead log beside it takes a few megabytes more."""
LOW_BYTES = 256 << 20
"""The free space on the disk, in bytes, below which nothing is written, to keep space for the control plane's records.
"""

_FULL = 0.9
"""The share of `MOST_BYTES` from which the oldest rows are deleted."""
_FORGOTTEN = 0.05
"""The share of the series that is forgotten at once to make room for new ones."""
_LIVE_S = 300.0
"""A series whose last point is younger than this is never forgotten: new series are dropped instead."""
_PRUNE_S = 600.0
_BUSY_S = 5.0
_CATCH_UP = 30
"""The most steps of a level that one write downsamples, so that the first write after a long pause does
not take long.
"""

log = logger(__name__)


@dataclass(slots=True, eq=False)
class Series:
    """A metric with its labels. `HistoryWriter.series` returns the same object for equal metric and labels, unless
    twice as many series are known as may be stored.
    """

    metric: str
    labels: Labels
    is_counter: bool
    id: int = 0
    """0 until the first point is written. A series that was forgotten and came back has a new id."""
    seen_s: float = 0.0


class HistoryWriter:
    """The only writer of a history. Any thread may call it, but only one at a time."""

    def __init__(
        self,
        path: Path,
        *,
        days: float = 7.0,
        most_series: int = MOST_SERIES,
        most_bytes: int = MOST_BYTES,
        low_bytes: int = LOW_BYTES,
    ) -> None:
        self._path, self._levels = path, levels(days)
        self._most_series, self._most_bytes, self._low_bytes = most_series, most_bytes, low_bytes
        self.problem = ""
        """The reason why the last write wrote nothing, or what happened to the file; empty if all is well."""
        self.dropped = 0
        """The number of points of new series that were dropped because of the limits."""
        self.replaced = 0
        """The number of times that the file could not be read and was replaced."""
        self._known: dict[tuple[str, Labels], Series] = {}
        self._stored: dict[int, Series] = {}
        self._metrics: dict[str, tuple[int, bool]] = {}
        self._done: dict[int, float] = {}
        self._pruned_s = self._written_s = -math.inf
        self._is_full = False
        """True if the present write has found no series to forget. A search takes a millisecond."""
        try:
            self._c = self._opened()
        except (sqlite3.DatabaseError, ValueError) as error:
            self._replace(error)

    def close(self) -> None:
        self._c.close()

    def series(self, metric: str, labels: Labels, is_counter: bool) -> Series:
        found = self._known.get((metric, labels))
        if found is None:
            found = Series(metric, labels, is_counter)
            if len(self._known) < 2 * self._most_series:
                self._known[metric, labels] = found
        return found

    def __len__(self) -> int:
        """Returns the number of stored series."""
        return len(self._stored)

    def write(self, at_s: float, points: Iterable[tuple[Series, float]]) -> bool:
        """Writes the points of one scrape. Returns True if that succeeded.

        Errors of the disk or the file are not raised. They are described in `problem`.
        """
        finite = [(series, value) for series, value in points if math.isfinite(value)]
        free = os.statvfs(self._path.parent)
        if free.f_bavail * free.f_frsize < self._low_bytes:
            self.problem = f"nothing is written: the disk has less than {self._low_bytes >> 20} MiB left"
            return False
        problem = ""
        for is_last in (False, True):
            try:
                self._write(at_s, finite)
            except sqlite3.ProgrammingError:  # ours, not the file's
                raise
            except sqlite3.DatabaseError as error:
                self._rollback()
                if not _is_passing(error):
                    self._replace(error)
                    problem = self.problem
                elif is_last or not self._make_room():
                    self.problem = f"nothing is written: {error}"
                    return False
            else:
                self.problem = problem
                return True
        return False

    def _write(self, at_s: float, points: Iterable[tuple[Series, float]]) -> None:
        rows: defaultdict[int, dict[int, Row]] = defaultdict(dict)
        self._is_full = False
        self._c.execute("BEGIN IMMEDIATE")
        for series, value in points:
            if self._stored.get(series.id) is not series and not self._register(series, at_s):
                continue
            self._stored[series.id].seen_s = at_s
            rows[self._metrics[series.metric][0]][series.id] = Row(1, value, value, value)
        self._insert(0, at_s, rows)
        for finer, level in pairwise(self._levels):
            self._downsample(finer, level, at_s)
        if not 0 <= at_s - self._pruned_s < _PRUNE_S or at_s < self._written_s:
            self._prune(at_s)
        self._c.execute("COMMIT")
        self._written_s = at_s
        if self._used() > _FULL * self._most_bytes:
            self._make_room()

    def _insert(self, level: int, at_s: float, rows: Mapping[int, Mapping[int, Row]]) -> None:
        packed = [(metric, level, at_s, pack(values, level)) for metric, values in rows.items()]
        self._c.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", packed)
        if packed:
            self._c.execute("INSERT OR IGNORE INTO times VALUES (?, ?)", (level, at_s))

    def _register(self, series: Series, at_s: float) -> bool:
        """Gives the series an id; returns False if the limit on series is reached. An id from a replaced file or from a
        rolled-back transaction may be that of another series by now.
        """
        name = (series.metric, series.labels)
        known = self._known.get(name)
        if known is not None and self._stored.get(known.id) is known:
            series.id = known.id
            return True
        if len(self._stored) >= self._most_series and (self._is_full or not self._forget_oldest(at_s)):
            self._is_full = True
            self.dropped += 1
            return False
        if series.metric not in self._metrics:
            insert = "INSERT INTO metrics (name, is_counter) VALUES (?, ?)"
            id = self._c.execute(insert, (series.metric, series.is_counter)).lastrowid
            assert id is not None
            self._metrics[series.metric] = (id, series.is_counter)
        insert = "INSERT INTO series (metric, labels, seen_s) VALUES (?, ?, ?)"
        labels = json.dumps(series.labels)
        id = self._c.execute(insert, (self._metrics[series.metric][0], labels, at_s)).lastrowid
        assert id is not None
        series.id = id
        self._known[name] = self._stored[id] = series
        return True

    def _forget_oldest(self, at_s: float) -> bool:
        """Forgets a share of the series: those whose last points are oldest."""
        old = sorted(
            (series for series in self._stored.values() if series.seen_s < at_s - _LIVE_S), key=lambda s: s.seen_s
        )
        return self._forget(old[: max(1, int(_FORGOTTEN * self._most_series))])

    def _forget(self, gone: list[Series]) -> bool:
        self._c.executemany("DELETE FROM series WHERE id = ?", [(series.id,) for series in gone])
        for series in gone:
            self._stored.pop(series.id, None)
        return bool(gone)

    def _downsample(self, finer: Level, level: Level, now_s: float) -> None:
        """Writes the completed steps of a level from the rows of the finer level. A step covers the rows in (start,
        end].
        """
        complete_s = math.floor(now_s / level.step_s) * level.step_s
        done_s = self._done.get(level.number, -math.inf)
        if done_s == complete_s:
            return
        if done_s < complete_s:  # else the clock was set back: what is there stays
            next_row = "SELECT min(at_s) FROM times WHERE level = ? AND at_s > ?"
            for _ in range(_CATCH_UP):
                found = self._c.execute(next_row, (finer.number, done_s)).fetchone()[0]
                start_s = complete_s if found is None else (math.ceil(found / level.step_s) - 1) * level.step_s
                if start_s >= complete_s:
                    break
                self._downsample_step(finer, level, start_s, start_s + level.step_s)
                done_s = start_s + level.step_s
            else:
                complete_s = done_s
        self._done[level.number] = complete_s
        self._c.execute("INSERT OR REPLACE INTO progress VALUES (?, ?)", (level.number, complete_s))

    def _downsample_step(self, finer: Level, level: Level, start_s: float, end_s: float) -> None:
        select = "SELECT data FROM rows WHERE metric = ? AND level = ? AND at_s > ? AND at_s <= ? ORDER BY at_s"
        found: dict[int, dict[int, Row]] = {}
        for metric, is_counter in self._metrics.values():
            parts: defaultdict[int, list[Row]] = defaultdict(list)
            for (data,) in self._c.execute(select, (metric, finer.number, start_s, end_s)):
                for id, row in unpack(data, finer.number):
                    parts[id].append(row)
            if parts:
                before = self._last_before(metric, finer, start_s) if is_counter else {}
                found[metric] = {id: downsampled(rows, is_counter, before.get(id)) for id, rows in parts.items()}
        self._insert(level.number, end_s, found)

    def _last_before(self, metric: int, finer: Level, at_s: float) -> dict[int, float]:
        select = "SELECT data FROM rows WHERE metric = ? AND level = ? AND at_s <= ? ORDER BY at_s DESC LIMIT 1"
        found = self._c.execute(select, (metric, finer.number, at_s)).fetchone()
        return {id: row.last for id, row in unpack(found[0], finer.number)} if found else {}

    def _prune(self, now_s: float) -> None:
        """Deletes rows that are too old and series without rows, and stores the time of the last point of all other
        series.

        Also deletes rows from before the clock was set back. Between them and new rows, counters would seem to restart.
        """
        for level in self._levels:
            old_s = now_s - level.keep_s
            for metric, _ in self._metrics.values():
                which = "DELETE FROM rows WHERE metric = ? AND level = ? AND"
                self._c.execute(f"{which} at_s < ?", (metric, level.number, old_s))
                self._c.execute(f"{which} at_s > ?", (metric, level.number, now_s))
            self._c.execute("DELETE FROM times WHERE level = ? AND at_s < ?", (level.number, old_s))
            self._c.execute("DELETE FROM times WHERE level = ? AND at_s > ?", (level.number, now_s))
        self._forget([series for series in self._stored.values() if series.seen_s < now_s - self._levels[-1].keep_s])
        self._known = {name: series for name, series in self._known.items() if series.id in self._stored}
        seen = [(series.seen_s, id) for id, series in self._stored.items()]
        self._c.executemany("UPDATE series SET seen_s = ? WHERE id = ?", seen)
        if self._c.execute("DELETE FROM metrics WHERE id NOT IN (SELECT metric FROM series)").rowcount:
            self._c.execute("DELETE FROM rows WHERE metric NOT IN (SELECT id FROM metrics)")
            self._metrics = _metrics(self._c)
        self._pruned_s = now_s

    def _make_room(self) -> bool:
        """Deletes the oldest quarter of the level that takes the most space; returns False if there was nothing to
        delete or it failed.
        """
        try:
            sizes = "SELECT level, sum(length(data)) AS size, min(at_s), max(at_s) FROM rows GROUP BY level ORDER BY 2"
            found = self._c.execute(sizes).fetchall()
            if not found:
                return False
            level, _, first_s, last_s = found[-1]
            until_s = first_s + (last_s - first_s) / 4
            self._c.execute("BEGIN IMMEDIATE")
            self._c.execute("DELETE FROM rows WHERE level = ? AND at_s <= ?", (level, until_s))
            self._c.execute("DELETE FROM times WHERE level = ? AND at_s <= ?", (level, until_s))
            self._c.execute("COMMIT")
            if self._pages("page_count") > self._most_bytes // self._pages("page_size"):
                self._c.execute("PRAGMA incremental_vacuum").fetchall()
        except sqlite3.DatabaseError:
            self._rollback()
            return False
        return True

    def _used(self) -> int:
        return (self._pages("page_count") - self._pages("freelist_count")) * self._pages("page_size")

    def _pages(self, name: str) -> int:
        return int(self._c.execute(f"PRAGMA {name}").fetchone()[0])

    def _rollback(self) -> None:
        """Rolls back, and reloads which series are stored, since some known ids may come from the transaction."""
        with suppress(sqlite3.DatabaseError):
            if self._c.in_transaction:
                self._c.execute("ROLLBACK")
            self._load(self._c)

    def _replace(self, error: Exception) -> None:
        self.replaced += 1
        self.problem = f"the history could not be read and begins again: {error}"
        log.warning("the history is replaced", extra={"path": str(self._path), "error": str(error)})
        if hasattr(self, "_c"):
            self._c.close()
        for end in ("", "-wal", "-shm", "-journal"):
            self._path.with_name(self._path.name + end).unlink(missing_ok=True)
        self._c = self._opened()

    def _opened(self) -> sqlite3.Connection:
        is_new = not self._path.exists()
        self._path.touch()
        self._path.chmod(0o600)
        c = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            if is_new:
                c.execute("PRAGMA auto_vacuum = INCREMENTAL")
            c.execute("PRAGMA journal_mode = WAL").fetchone()
            c.execute("PRAGMA synchronous = NORMAL")
            c.execute(f"PRAGMA journal_size_limit = {4 << 20}").fetchone()
            size = int(c.execute("PRAGMA page_size").fetchone()[0])
            c.execute(f"PRAGMA max_page_count = {max(64, self._most_bytes // size)}").fetchone()
            version = int(c.execute("PRAGMA user_version").fetchone()[0])
            if version == 0 and not c.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
                c.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            elif version != VERSION:
                raise ValueError(f"its version is {version}")
            self._load(c)
        except BaseException:
            c.close()
            raise
        return c

    def _load(self, c: sqlite3.Connection) -> None:
        self._metrics = _metrics(c)
        names: Mapping[int, tuple[str, bool]] = {
            id: (name, is_counter) for name, (id, is_counter) in self._metrics.items()
        }
        self._done = dict(c.execute("SELECT level, until_s FROM progress").fetchall())
        self._stored = {}
        for id, metric, labels, seen_s in c.execute("SELECT id, metric, labels, seen_s FROM series"):
            name, is_counter = names[metric]
            series = self.series(name, tuple((key, value) for key, value in json.loads(labels)), is_counter)
            series.id, series.seen_s = id, max(series.seen_s, seen_s)
            self._stored[id] = series


def _metrics(c: sqlite3.Connection) -> dict[str, tuple[int, bool]]:
    return {name: (id, bool(is_counter)) for id, name, is_counter in c.execute("SELECT * FROM metrics")}


def _is_passing(error: sqlite3.DatabaseError) -> bool:
    """Returns whether the error may end with more disk space or with time, so that the file need not be replaced."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    return code in (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
    )
