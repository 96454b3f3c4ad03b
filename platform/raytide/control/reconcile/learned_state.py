"""Persists in `learned.json` what the controller learned about endpoints and jobs, because learning takes long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import PositiveFloat

from raytide.autoscaler.endpoints.cold_start import Start
from raytide.autoscaler.endpoints.replica_value import SavedModel
from raytide.autoscaler.endpoints.slo_controller import SavedModels
from raytide.autoscaler.endpoints.traffic import Speeds, Starts
from raytide.autoscaler.job_throughput import Learned as Strides
from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.errors import ConfigError
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.logs import logger
from raytide.core.objects.endpoint import Speed

log = logger(__name__)

C = TypeVar("C", bound=Config)

PERIOD_S = 60.0


class _Entry(Config):
    most_bytes: ClassVar[int] = bounds.MOST_FILE_BYTES

    endpoint: str
    created_at_s: float
    served: str
    speed: dict[str, Speed]
    starts: tuple[Start, ...] = ()
    fleet: SavedModel | None


class _JobEntry(Config):
    most_bytes: ClassVar[int] = bounds.MOST_FILE_BYTES

    job: str
    strides: dict[str, PositiveFloat]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The learned facts. `speeds` has the speed of a replica by endpoint and node type. `starts` has the last starts of
    replicas by endpoint. `fleets` has what was learned about endpoints with an SLO. `strides` has the steps per second
    per GPU by job and node type.
    """

    speeds: Speeds = field(default_factory=dict)
    starts: Starts = field(default_factory=dict)
    fleets: SavedModels = field(default_factory=dict)
    strides: Strides = field(default_factory=dict)


class LearnedState:
    """Reads and writes `learned.json`. A part of the file that cannot be read is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known = Knowledge()
        self._written_s = 0.0
        try:
            kept = read_json(path) or {}
        except (ValueError, OSError) as error:
            self._warn("cannot read what was learned", error)
            return
        endpoints = {(e.endpoint, e.created_at_s, e.served): e for e in self._entries(kept, "endpoints", _Entry)}
        self.known = Knowledge(
            speeds={key: entry.speed for key, entry in endpoints.items() if entry.speed},
            starts={key: entry.starts for key, entry in endpoints.items() if entry.starts},
            fleets={key: entry.fleet for key, entry in endpoints.items() if entry.fleet is not None},
            strides={entry.job: entry.strides for entry in self._entries(kept, "jobs", _JobEntry)},
        )

    def save(self, known: Knowledge, now_s: float) -> None:
        """Writes `learned.json` if something changed, at most once a minute. A failure is only logged, because a new
        controller can learn the facts again."""
        if 0.0 <= now_s - self._written_s < PERIOD_S or known == self.known:
            return
        self._written_s = now_s
        entries = [
            _Entry(
                endpoint=key[0],
                created_at_s=key[1],
                served=key[2],
                speed=known.speeds.get(key, {}),
                starts=known.starts.get(key, ()),
                fleet=known.fleets.get(key),
            )
            for key in sorted({*known.speeds, *known.starts, *known.fleets})
        ]
        jobs = [_JobEntry(job=job_id, strides=dict(strides)) for job_id, strides in sorted(known.strides.items())]
        try:
            write_json(
                self._path,
                {"endpoints": [entry.model_dump() for entry in entries], "jobs": [job.model_dump() for job in jobs]},
            )
        except OSError as error:
            self._warn("cannot keep what was learned", error)
            return
        self.known = known

    def _entries(self, kept: Mapping[str, object], name: str, kind: type[C]) -> Iterator[C]:
        entries = kept.get(name)
        for entry in entries if isinstance(entries, list) else []:
            try:
                yield kind.parse(entry, where="what was learned")
            except ConfigError as error:
                self._warn(f"cannot read what was learned of one of the {name}", error)

    def _warn(self, what: str, error: Exception) -> None:
        log.warning(what, extra={"path": str(self._path), "error": str(error)})
