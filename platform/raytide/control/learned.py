"""What the controller learned of endpoints and could not learn again soon, in a file beside its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytide.autoscaler.slo_fleets import Fleets
from raytide.autoscaler.traffic import Key, Speeds
from raytide.core.durable import read_json, write_json
from raytide.core.endpoint import Speed
from raytide.core.errors import ConfigError
from raytide.core.logs import logger

log = logger(__name__)

PERIOD_S = 60.0


class Learned:
    """Speeds of replicas, and the memories of the serving policy. A file that cannot be read is nothing learned."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.speeds: Speeds = {}
        self.fleets: Fleets = {}
        self._written_s = 0.0
        try:
            for entry in (read_json(path) or {}).get("endpoints", []):
                self._read(entry)
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            log.warning("cannot read what was learned", extra={"path": str(path), "error": str(error)})

    def keep(self, speeds: Speeds, fleets: Fleets, now_s: float) -> None:
        """Once a minute, and only what changed."""
        if 0.0 <= now_s - self._written_s < PERIOD_S or (speeds, fleets) == (self.speeds, self.fleets):
            return
        self.speeds, self.fleets, self._written_s = speeds, fleets, now_s
        keys = sorted({*speeds, *fleets})
        write_json(self._path, {"endpoints": [_entry(key, speeds.get(key, {}), fleets.get(key, {})) for key in keys]})

    def _read(self, entry: dict[str, Any]) -> None:
        key = (str(entry["endpoint"]), float(entry["created_at_s"]))
        speeds = {name: Speed.parse(speed, where="learned speed") for name, speed in entry["speed"].items()}
        self.speeds = {**self.speeds, **({key: speeds} if speeds else {})}
        self.fleets = {**self.fleets, **({key: entry["fleet"]} if entry["fleet"] else {})}


def _entry(key: Key, speeds: dict[str, Speed], fleet: dict[str, object]) -> dict[str, object]:
    told = {node_type: speed.model_dump() for node_type, speed in speeds.items()}
    return {"endpoint": key[0], "created_at_s": key[1], "speed": told, "fleet": fleet}
