"""What the controller learned of replicas and could not learn again soon, in a file beside its records."""

from __future__ import annotations

from pathlib import Path

from raytide.autoscaler.traffic import Speeds
from raytide.core.durable import read_json, write_json
from raytide.core.endpoint import Speed
from raytide.core.errors import ConfigError
from raytide.core.logs import logger

log = logger(__name__)

PERIOD_S = 60.0


class Learned:
    """The speeds of replicas. A file that cannot be read is nothing learned."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.speeds: Speeds = self._read()
        self._written_s = 0.0

    def keep(self, speeds: Speeds, now_s: float) -> None:
        """Once a minute, and only what changed."""
        if now_s - self._written_s < PERIOD_S:
            return
        self._written_s = now_s
        if speeds != self.speeds:
            self.speeds = speeds
            write_json(self._path, {"speeds": [_entry(*key, by_type) for key, by_type in speeds.items()]})

    def _read(self) -> Speeds:
        try:
            entries = (read_json(self._path) or {}).get("speeds", [])
            return {(e["endpoint"], float(e["created_at_s"])): _speeds(e["speed"]) for e in entries}
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            log.warning("cannot read what was learned", extra={"path": str(self._path), "error": str(error)})
            return {}


def _entry(endpoint: str, created_at_s: float, by_type: dict[str, Speed]) -> dict[str, object]:
    speeds = {node_type: speed.model_dump() for node_type, speed in by_type.items()}
    return {"endpoint": endpoint, "created_at_s": created_at_s, "speed": speeds}


def _speeds(by_type: dict[str, dict[str, float]]) -> dict[str, Speed]:
    return {node_type: Speed.parse(speed, where="learned speed") for node_type, speed in by_type.items()}
