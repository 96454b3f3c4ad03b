"""The pages that Prometheus and raytide's monitor scrape, as the API's service discovery lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.logs import logger

log = logger(__name__)

_ANNOUNCED = "targets"
"""The subfolder of the run folder with the announced pages."""

ScrapeJob = Literal[
    "raytide-api", "raytide-gateway", "raytide-replica", "raytide-node", "raytide-gpu", "raytide-monitor"
]


@dataclass(frozen=True, slots=True)
class Target:
    """One metrics page."""

    job: ScrapeJob
    address: str
    """The address as host:port, which is also the `instance` of the page's series."""
    path: str = "/metrics"
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Labels that Prometheus adds to each series of the page, such as `node`."""

    @property
    def url(self) -> str:
        return f"http://{self.address}{self.path}"


def discovery(targets: Iterable[Target]) -> list[dict[str, object]]:
    """Returns these targets as JSON for Prometheus' HTTP service discovery."""
    return [
        {
            "targets": [target.address],
            "labels": {"job": target.job, "__metrics_path__": target.path, **target.labels},
        }
        for target in targets
    ]


def announce(folder: Path, process: str, target: Target) -> None:
    """Records the metrics page of one of the head's processes as a file in the run folder. The API lists the recorded
    pages. A restarted process overwrites its record. The record of a stopped process stays, so Prometheus shows the
    target as down.

    If the disk is full, the process runs without a record, because its work matters more than its metrics.
    """
    path = folder / _ANNOUNCED
    try:
        path.mkdir(exist_ok=True)
        write_json(path / f"{process}.json", asdict(target))
    except OSError as error:
        log.warning("a metrics page is not listed", extra={"process_name": process, "error": str(error)})


def announced(folder: Path) -> list[Target]:
    """Returns the recorded metrics pages, sorted by the names of their processes."""
    records = [read_json(file) for file in sorted((folder / _ANNOUNCED).glob("*.json"))]
    return [Target(**record) for record in records if record is not None]
