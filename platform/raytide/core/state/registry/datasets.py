"""Registered datasets in the store: their versions, which are never changed, and the jobs and models that used them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from raytide.core.errors import NotFoundError
from raytide.core.io.token_dataset import ITEM_BYTES, dtype_for
from raytide.core.objects.job import JobKind
from raytide.core.specs.data import DatasetUse, DatasetVersion, DatasetVersionSpec, RegisteredDataset
from raytide.core.specs.mixture import MOST_SOURCES
from raytide.core.state import tables as core
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.registry import tables as t
from raytide.core.state.registry.versions import add_version, newest_of, newest_rows, version_rows
from raytide.core.state.tenancy.audit import record

_MOST_USES = 100
_READ_AT = (
    ("config", "dataset"),
    ("config", "eval", "dataset"),
    *(("config", "dataset", "sources", source, "dataset") for source in range(MOST_SOURCES)),
)
"""The paths in the spec of a training job that name datasets."""


class DatasetRecords(DatabaseAccess):
    def register(self, spec: DatasetVersionSpec, user: str, now_s: float) -> DatasetVersion:
        """Adds a version of a dataset. If a version with the same manifest exists, returns that version.

        Raises ConflictError if the name belongs to another team, and QuotaError if the team has too many versions.
        """
        with self._db.write() as c:
            row, is_new = add_version(c, t.datasets, spec, spec.sha256, user, now_s)
            version = _version(row)
            if is_new:
                shown = {"team": spec.team, "location": spec.location, "sha256": spec.sha256, "job": spec.job}
                record(c, "dataset.register", version.id, shown)
            return version

    def find(self, name: str, version: int | None = None) -> DatasetVersion:
        """Returns a version of a dataset. If `version` is None, returns the newest. Raises NotFoundError if there is
        none."""
        d = t.datasets.c
        query = t.datasets.select().where(d.name == name).order_by(d.version.desc()).limit(1)
        if version is not None:
            query = query.where(d.version == version)
        row = self._db.first(query)
        if row is None:
            what = name if version is None else f"{name}:{version}"
            raise NotFoundError(f"dataset {what} is not registered.", hint="`raytide data list` lists datasets.")
        return _version(row)

    def versions(self, name: str, *, limit: int = 100, offset: int = 0) -> tuple[DatasetVersion, ...]:
        """Returns versions of a dataset, newest first."""
        with self._db.read() as c:
            return tuple(_version(row) for row in version_rows(c, t.datasets, name, limit, offset))

    def datasets(self, *, team: str | None = None, limit: int = 100, offset: int = 0) -> tuple[RegisteredDataset, ...]:
        """Returns a page of datasets, sorted by name. Each dataset comes with its newest version."""
        page = newest_of(t.datasets, team=team, name=None, limit=limit, offset=offset)
        with self._db.read() as c:
            rows = newest_rows(c, t.datasets, page, limit)
            return tuple(RegisteredDataset(row.name, row.team, row.versions, _version(row)) for row in rows)

    def bytes_at(self, location: str, team: str) -> int:
        """Returns the size in bytes of the token data at this location. The size is computed from the newest dataset
        version that the team has registered for the location. Returns 0 if there is no such version.
        """
        d = t.datasets.c
        here = sa.and_(d.team == team, d.spec["location"].as_string() == location)
        row = self._db.first(t.datasets.select().where(here).order_by(d.created_at_s.desc()).limit(1))
        if row is None:
            return 0
        spec = _version(row).spec
        return spec.tokens * ITEM_BYTES[dtype_for(spec.vocab_size)]

    def uses(self, spec: DatasetVersionSpec) -> DatasetUse:
        """Returns the team's newest jobs that read the dataset's location, and the team's models that were trained on
        the dataset. Jobs that read the location as a source of a mixture or as held-out data count as well. A model's
        lineage names the dataset by the hash of the manifest.
        """
        j, m = core.jobs.c, t.models.c
        read = sa.or_(*(j.spec[path].as_string() == spec.location for path in _READ_AT))
        jobs = sa.select(j.id).where(j.kind == JobKind.TRAIN, j.team == spec.team, read).order_by(j.number.desc())
        made = m.spec["lineage"]["dataset_sha256"].as_string() == spec.sha256
        models = sa.select(m.name, m.version).where(m.team == spec.team, made).order_by(m.created_at_s.desc())
        with self._db.read() as c:
            return DatasetUse(
                jobs=tuple(c.execute(jobs.limit(_MOST_USES)).scalars()),
                models=tuple(f"{row.name}:{row.version}" for row in c.execute(models.limit(_MOST_USES))),
            )


def _version(row: sa.Row[Any]) -> DatasetVersion:
    return DatasetVersion(DatasetVersionSpec.model_validate(row.spec), row.version, row.user, row.created_at_s)
