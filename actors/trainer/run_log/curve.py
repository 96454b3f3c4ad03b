"""Reads the curves of a run while they grow. Each byte is read once. No more points are kept than a screen shows."""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raytide.actors.trainer.types import scalar_metrics
from raytide.core.io.storage import join, open_url

MOST_POINTS = 2000
"""The most points that are kept of a run. Above that, every second one is dropped."""
MOST_EVENTS, MOST_EVENT_BYTES = 500, 2**20
"""The most events that are kept of a run, and their most bytes together, as JSON."""
MOST_NAMES, _NAME_CHARS = 256, 200
"""The most values of a run that are kept, and the longest name of one. Users can write into the folder of a run."""
MOST_RUNS = 64
_PART_BYTES = 2**22
_MOST_LINE = 2**20


@dataclass(frozen=True, slots=True)
class RunCurves:
    """The logged values of a run as columns of equal length. If a step was repeated, only its last values are
    included.
    """

    steps: tuple[int, ...]
    at_s: tuple[float | None, ...]
    values: Mapping[str, tuple[float | None, ...]]
    """The values by name: `loss`, `lr`, `tokens_per_s`..., and `times/PHASE` for the seconds of each phase."""
    events: tuple[Mapping[str, Any], ...]
    """Restarts, resizes and other events, oldest first; at most the last 500, and 1 MiB of them."""
    every: int
    """The number of logged steps from one shown step to the next; the last step is always shown."""


class CurveReader:
    """Reads the curves of one run. Each call of `read` continues where the previous call ended."""

    def __init__(self, out: str, most_points: int = MOST_POINTS) -> None:
        self._steps, self._events = _Lines(join(out, "metrics.jsonl")), _Lines(join(out, "events.jsonl"))
        self._most_points = most_points
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._points: list[dict[str, Any]] = []
        self._last: dict[str, Any] | None = None
        self._every, self._seen = 1, 0
        self._names: dict[str, str] = {}
        self._kept_events: deque[tuple[int, dict[str, Any]]] = deque()
        self._event_bytes = 0

    def read(self, points: int = MOST_POINTS) -> RunCurves:
        """Returns all curves. Each curve has about `points` points."""
        with self._lock:
            if self._steps.is_new():
                self._clear()
                self._events.forget()
            for line in self._steps.read():
                self._add(line)
            for event in self._events.read():
                self._keep(event)
            return self._columns(max(2, points))

    def _add(self, line: dict[str, Any]) -> None:
        step = line.get("step")
        if not isinstance(step, int) or not isinstance(line.get("times", {}), dict):
            return
        if self._last is not None and step <= self._last["step"]:  # it went back to a checkpoint
            self._points = [point for point in self._points if point["step"] < step]
        values = self._known(scalar_metrics({"times": {}, **line}))
        self._last = {"step": step, "at_s": line.get("at_s"), **values}
        if self._seen % self._every == 0:
            self._points.append(self._last)
        self._seen += 1
        if len(self._points) > self._most_points:
            self._points, self._every = self._points[::2], self._every * 2

    def _keep(self, event: dict[str, Any]) -> None:
        """Keeps an event in place of the oldest ones, which are dropped if there are too many."""
        try:
            size = len(json.dumps(event))
        except RecursionError:
            return
        self._kept_events.append((size, event))
        self._event_bytes += size
        while len(self._kept_events) > MOST_EVENTS or self._event_bytes > MOST_EVENT_BYTES:
            self._event_bytes -= self._kept_events.popleft()[0]

    def _known(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the values whose names are among the first MOST_NAMES names of the run."""
        for name in values:
            if len(self._names) < MOST_NAMES and len(name) <= _NAME_CHARS:
                self._names.setdefault(name, name)
        return {self._names[name]: value for name, value in values.items() if name in self._names}

    def _columns(self, points: int) -> RunCurves:
        stride = max(1, -(-len(self._points) // points))
        shown = self._points[::stride]
        if self._last is not None and (not shown or shown[-1] is not self._last):
            shown = [*shown, self._last]
        names = dict.fromkeys(name for point in shown for name in point if name not in ("step", "at_s"))
        return RunCurves(
            steps=tuple(point["step"] for point in shown),
            at_s=tuple(_number(point["at_s"]) for point in shown),
            values={name: tuple(_number(point.get(name)) for point in shown) for name in names},
            events=tuple(event for _, event in self._kept_events),
            every=self._every * stride,
        )


class CurveReaders:
    """A cache of CurveReader objects for the most recently requested runs."""

    def __init__(self, most: int = MOST_RUNS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, CurveReader] = OrderedDict()

    def read(self, out: str, points: int) -> RunCurves:
        """Returns the curves of the run in `out`, a directory or an fsspec URL. The curves are empty before the run's
        first step.
        """
        with self._lock:
            reader = self._readers.setdefault(out, CurveReader(out))
            self._readers.move_to_end(out)
            while len(self._readers) > self._most:
                self._readers.popitem(last=False)
        return reader.read(points)


class _Lines:
    """The complete lines of a file of JSON objects, each returned once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._offset = 0

    def forget(self) -> None:
        self._offset = 0

    def is_new(self) -> bool:
        """Returns True if the file is shorter than the part read so far, so it was written anew. Reading then restarts
        at its beginning.
        """
        if self._offset and self._size() < self._offset:
            self._offset = 0
            return True
        return False

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields the new lines one after another, because a long run's lines together may not fit in memory."""
        if self._size() <= self._offset:
            return
        fs, path = open_url(self._url)
        with fs.open(path, "rb") as file:
            file.seek(self._offset)
            rest = b""
            while part := file.read(_PART_BYTES):
                *lines, rest = (rest + part).split(b"\n")
                self._offset += sum(len(line) + 1 for line in lines)
                yield from (parsed for line in lines if (parsed := _parsed(line)) is not None)
                if len(rest) > _MOST_LINE:  # no line of a run is as long
                    break

    def _size(self) -> int:
        fs, path = open_url(self._url)
        fs.invalidate_cache()
        try:
            return int(fs.size(path) or 0)
        except FileNotFoundError:
            return 0


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line, parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _integer(text: str) -> int | float:
    """Returns an integer; infinity if a float cannot hold it, as for `1e999`."""
    return int(text) if len(text) < sys.float_info.max_10_exp else float(text)


def _number(value: object) -> float | None:
    """Returns `value` if it is a finite number, else None, because JSON cannot represent NaN and infinity."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value or abs(value) == float("inf"):
        return None
    return float(value)
