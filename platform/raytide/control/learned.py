"""What the controller learned of endpoints and could not learn again soon, in a file beside its records."""

from __future__ import annotations

from pathlib import Path

from raytide.autoscaler.serving_memory import Past
from raytide.autoscaler.slo_fleets import Fleets
from raytide.autoscaler.traffic import Speeds
from raytide.core.config import Config
from raytide.core.durable import read_json, write_json
from raytide.core.endpoint import Speed
from raytide.core.errors import ConfigError
from raytide.core.logs import logger

log = logger(__name__)

PERIOD_S = 60.0


class _Entry(Config):
    endpoint: str
    created_at_s: float
    speed: dict[str, Speed]
    fleet: Past | None


class Learned:
    """Speeds of replicas, and the memories of the serving policy. What cannot be read is nothing learned."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.speeds: Speeds = {}
        self.fleets: Fleets = {}
        self._written_s = 0.0
        try:
            entries = (read_json(path) or {}).get("endpoints")
        except (ValueError, OSError) as error:
            self._complain("cannot read what was learned", error)
            return
        for entry in entries if isinstance(entries, list) else []:
            try:
                self._take(_Entry.parse(entry, where="what was learned"))
            except ConfigError as error:
                self._complain("cannot read what was learned of an endpoint", error)

    def keep(self, speeds: Speeds, fleets: Fleets, now_s: float) -> None:
        """Once a minute, and only what changed. Without it a new controller learns anew: no reason to stop this one."""
        if 0.0 <= now_s - self._written_s < PERIOD_S or (speeds, fleets) == (self.speeds, self.fleets):
            return
        self._written_s = now_s
        entries = [
            _Entry(endpoint=key[0], created_at_s=key[1], speed=speeds.get(key, {}), fleet=fleets.get(key))
            for key in sorted({*speeds, *fleets})
        ]
        try:
            write_json(self._path, {"endpoints": [entry.model_dump() for entry in entries]})
        except OSError as error:
            self._complain("cannot keep what was learned", error)
            return
        self.speeds, self.fleets = speeds, fleets

    def _take(self, entry: _Entry) -> None:
        key = entry.endpoint, entry.created_at_s
        self.speeds = {**self.speeds, **({key: entry.speed} if entry.speed else {})}
        self.fleets = {**self.fleets, **({key: entry.fleet} if entry.fleet is not None else {})}

    def _complain(self, what: str, error: Exception) -> None:
        log.warning(what, extra={"path": str(self._path), "error": str(error)})
