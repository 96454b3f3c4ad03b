"""Keeps a cluster's repositories: applies the retention, and copies the newest snapshot to the cold repository."""

from __future__ import annotations

import time

from raytide.control.backup.place import BackupPlace
from raytide.control.backup.repository import Repository
from raytide.control.backup.results import failures_recorded, record_run
from raytide.control.backup.run import working
from raytide.core.errors import ConfigError


def create_repositories(place: BackupPlace) -> list[Repository]:
    """Creates the repositories that do not exist yet, and returns them."""
    created = [place.hot] if place.hot.init() else []
    if place.cold is not None and place.cold.init(like=place.hot):
        created.append(place.cold)
    return created


def forget(place: BackupPlace) -> tuple[int, int]:
    """Removes the snapshots that the retention does not keep; returns the numbers of those kept and removed."""
    with working(place.cluster), failures_recorded(place, "forget"):
        began_s = time.monotonic()
        found = place.hot.forget(place.cluster, place.settings.keep.model_dump())
        record_run(place, "forget", time.monotonic() - began_s)
        return found


def copy_to_cold(place: BackupPlace) -> str:
    """Copies the newest snapshot to the cold repository, and returns its id. Data that is there is not sent again."""
    if place.cold is None:
        raise ConfigError("there is no cold repository.", hint="Set metadata.raytide.backup.cold_repository.")
    with working(place.cluster), failures_recorded(place, "cold"):
        began_s = time.monotonic()
        known = place.hot.snapshots(place.cluster)
        if not known:
            raise ConfigError("there is no snapshot to copy.", hint="`raytide backup run` makes one.")
        place.cold.copy_from(place.hot, [known[-1].id])
        record_run(place, "cold", time.monotonic() - began_s, known[-1].id)
        return known[-1].id
