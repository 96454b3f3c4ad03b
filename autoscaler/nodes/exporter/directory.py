"""The ports of all nodes' exporters, announced in Ray's GCS.

An entry contains only a port. The controller combines the port with the address of Ray's agent on the node. A forged
entry therefore cannot make the controller read another machine's page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raytide.autoscaler.ray_gcs import GcsEntries
from raytide.core.clock import Clock
from raytide.core.ray_internals import GcsClient

ANNOUNCE_EVERY_S = 30.0
_SILENT_S = 4 * ANNOUNCE_EVERY_S
"""The time without a new announcement after which an exporter counts as gone."""
_FORGET_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Seen:
    body: bytes
    at_s: float
    """The reader's time at which the body last changed."""


class ExporterDirectory:
    """Announces the ports of exporters, and lists the announced ports."""

    def __init__(self, connect: Callable[[], GcsClient], clock: Clock) -> None:
        self._entries, self._clock = GcsEntries("exporter/", connect), clock
        self._seen: dict[str, _Seen] = {}

    def announce(self, ray_name: str, port: int) -> None:
        """Stores the port and the current time under Ray's name of the node. The changing time shows that the exporter
        is alive.
        """
        self._entries.put(ray_name, json.dumps({"port": port, "at_s": self._clock.now_s()}).encode())

    def ports(self) -> Mapping[str, int]:
        """Returns the ports of the exporters that are alive, keyed by Ray's name of the node. Removes entries that have
        not changed for an hour.
        """
        now_s = self._clock.now_s()
        before, self._seen, found = self._seen, {}, {}
        for name, body in self._entries.all().items():
            last = before.get(name)
            seen = last if last is not None and last.body == body else _Seen(body, now_s)
            if now_s - seen.at_s > _FORGET_S:
                self._entries.remove(name)
                continue
            self._seen[name] = seen
            port = _port(body)
            if port is not None and now_s - seen.at_s <= _SILENT_S:
                found[name] = port
        return found


def _port(body: bytes) -> int | None:
    """Returns the port of an entry; None if it holds no port, since any process of the cluster can write there."""
    try:
        port = json.loads(body)["port"]
    except (ValueError, LookupError, TypeError):
        return None
    return port if isinstance(port, int) and 0 < port < 65536 else None
