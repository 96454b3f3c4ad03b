"""Serves the output of an endpoint's replicas, which are processes on several nodes. The output is served in parts, and
each part consists of whole lines.

A position consists of entries `REPLICA.FILE:BYTE`, joined by commas. A file without an entry is read from its
beginning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from raytide.control.views import EndpointLogPart, LogLine
from raytide.core.clock import utc
from raytide.core.errors import ClusterError, UsageError
from raytide.core.logs import scrubbed
from raytide.core.objects.endpoint_load import ReplicaLog
from raytide.core.objects.node import Node, NodeState

PART_BYTES = 2**18
"""The most bytes that are read from each file for one part."""
_PLACE = re.compile(r"([\w~-]{1,100})\.(\d{1,2}):(\d{1,18})")
_MOST_PLACES = 256
"""The most files in a position: two of each of 16 replicas, for several revisions of which some still drain."""
_AGENT, _NAME = re.compile(r"[\w.:\[\]-]{3,300}"), re.compile(r"[\w.-]{1,255}")
"""The address and file names that replicas have published, which are parts of a URL."""


class LogFiles(Protocol):
    def file(self, agent: str, name: str, start: int, most: int) -> tuple[bytes, int]:
        """Returns up to `most` bytes of a file, beginning at byte `start`, and the file's size."""


@dataclass(frozen=True, slots=True)
class _Piece:
    lines: list[LogLine]
    end: int
    has_more: bool


def gone_nodes(nodes: Iterable[Node]) -> dict[str, str]:
    """Returns the dead nodes, as a map from Ray's node id to the reason why the node has no log agent.

    An agent ends with its node's raylet. Callers skip these nodes, because a call to a machine that is gone may block
    for its whole timeout.
    """
    found = dict[str, str]()
    for node in nodes:
        if node.state is NodeState.GONE:
            found[node.ray_node_id] = f"node {node.id} is gone ({node.reason})"
        elif node.lost_at_s is not None:
            found[node.ray_node_id] = f"node {node.id} has been dead in Ray since {utc(node.lost_at_s)}"
    return found


def part(
    files: LogFiles,
    logs: Sequence[ReplicaLog],
    after: str,
    tail: int | None,
    running: Iterable[str],
    gone: Mapping[str, str],
) -> EndpointLogPart:
    """Returns the lines after a position, or the last `tail` lines of each file, in order of time.

    `missing` in the result names the replicas whose node does not answer. The lines of such a replica are returned
    in a later part, when its node answers. `running` are the replicas that may still write. For all other replicas,
    an incomplete last line is returned as it is. `gone` maps the id of each node without a log agent to the reason.
    These nodes are not asked.
    """
    places, alive = _parsed(after), set(running)
    lines: list[LogLine] = []
    missing, unread, has_more = set[str](), dict[str, str](), False
    for log in sorted(logs, key=lambda each: each.began_at_s):
        if log.node in gone:
            unread[log.replica] = gone[log.node]
            continue
        for number, name in enumerate(log.files):
            key = f"{log.replica}.{number}"
            try:
                piece = _piece(files, log, name, places.get(key, 0), tail, is_over=log.replica not in alive)
            except ClusterError:
                missing.add(log.replica)
                continue
            lines += piece.lines
            places[key], has_more = piece.end, has_more or piece.has_more
    known = {f"{log.replica}.{number}" for log in logs for number in range(len(log.files))}
    position = ",".join(f"{key}:{byte}" for key, byte in places.items() if key in known)
    in_order = sorted(lines, key=lambda line: line.at)
    return EndpointLogPart(in_order, position, has_more, tuple(sorted(missing)), unread)


def _piece(files: LogFiles, log: ReplicaLog, name: str, start: int, tail: int | None, *, is_over: bool) -> _Piece:
    if not (_AGENT.fullmatch(log.agent) and _NAME.fullmatch(name)):
        raise ClusterError(f"replica {log.replica} has published no place of its log.")
    agent = f"http://{log.agent}"
    data, size = files.file(agent, name, start, PART_BYTES)
    if size < start:  # Ray began a new file, because the old one was too large
        start, (data, size) = 0, files.file(agent, name, 0, PART_BYTES)
    if tail is not None and size - start > len(data):  # only the end is wanted, and this was the beginning
        start = max(0, size - PART_BYTES)
        data, size = files.file(agent, name, start, PART_BYTES)
    is_last = start + len(data) >= size
    if not (is_last and is_over) and (end := data.rfind(b"\n")) >= 0:
        data = data[: end + 1]
    elif not (is_last and is_over) and len(data) < PART_BYTES:
        data = b""  # the line is not complete
    texts = data.decode(errors="replace").splitlines()
    if tail is not None:
        texts = texts[-tail:] if tail else []
    return _Piece(_timed(log, texts), start + len(data), not is_last)


def _timed(log: ReplicaLog, texts: Iterable[str]) -> list[LogLine]:
    """Returns the lines with their times. A line without a time has that of the line before it."""
    at, lines = "", []
    for text in texts:
        at = _time_of(text) or at
        lines.append(LogLine(log.replica, at, scrubbed(text)))
    return lines


def _time_of(text: str) -> str:
    if not text.startswith('{"at": "'):
        return ""
    try:
        return str(json.loads(text)["at"])
    except (ValueError, KeyError, RecursionError):
        return ""


def _parsed(after: str) -> dict[str, int]:
    places = dict[str, int]()
    for place in after.split(",") if after else ():
        if (found := _PLACE.fullmatch(place)) is None or len(places) >= _MOST_PLACES:
            raise UsageError(f"{place[:100]!r} is not a position in a log.", hint="Use the `after` of the last answer.")
        places[f"{found[1]}.{found[2]}"] = int(found[3])
    return places
