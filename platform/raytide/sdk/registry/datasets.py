"""Registered datasets in the SDK: `rt.connect().datasets`."""

from __future__ import annotations

import re
from pathlib import Path

from raytide.control.client import ApiClient
from raytide.control.views import from_json
from raytide.core.errors import ConflictError, UsageError
from raytide.core.io.html import ShownList
from raytide.core.io.storage import local_path
from raytide.core.io.token_dataset import TokenManifest, load_manifest, sha256_of, verify
from raytide.core.specs.data import DatasetUse, DatasetVersion, DatasetVersionSpec, RegisteredDataset
from raytide.registry.lineage import FieldChange, differences

_REFERENCE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([0-9]{1,9}))?")


class DatasetRegistry:
    """The registered datasets of a cluster. A dataset reference is `NAME:VERSION`, or `NAME` for the newest version.

    A finished build registers its dataset. Registering the same dataset again returns the existing version.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def all(self, *, limit: int = 100, offset: int = 0) -> list[RegisteredDataset]:
        """Returns the registered datasets in order of name, each with its newest version."""
        answer = self._client.call("GET", "/v1/datasets", None, {"limit": limit, "offset": offset})
        found = from_json(list[RegisteredDataset], answer)
        return ShownList(found, "datasets", ("dataset", "team", "versions", "documents", "tokens"), _row)

    def get(self, reference: str) -> DatasetVersion:
        """Returns the version to which a reference points."""
        name, number = _parsed(reference)
        path = f"/v1/datasets/{name}" if number is None else f"/v1/datasets/{name}/versions/{number}"
        return from_json(DatasetVersion, self._client.call("GET", path))

    def versions(self, name: str, *, limit: int = 100, offset: int = 0) -> list[DatasetVersion]:
        """Returns versions of a dataset, the newest first."""
        query = {"limit": limit, "offset": offset}
        return from_json(list[DatasetVersion], self._client.call("GET", f"/v1/datasets/{name}/versions", None, query))

    def uses(self, version: DatasetVersion) -> DatasetUse:
        """Returns the training jobs that read a dataset version, and the registered models that were trained on it."""
        path = f"/v1/datasets/{version.spec.name}/versions/{version.version}/uses"
        return from_json(DatasetUse, self._client.call("GET", path))

    def register(self, location: str | Path, name: str) -> DatasetVersion:
        """Registers a dataset that was not built by a job of this cluster. Reads all of its files, and raises DataError
        if one differs from the manifest.
        """
        where = str(location)
        if (path := local_path(where)) is not None:
            where = str(Path(path).resolve())
        spec = DatasetVersionSpec.of(verify(where), sha256_of(where), name=name, location=where)
        body = spec.model_dump(mode="json", exclude={"team"})
        return from_json(DatasetVersion, self._client.call("POST", "/v1/datasets", body))

    def diff(self, before: str, after: str) -> tuple[FieldChange, ...]:
        """Returns the fields in which two versions differ, including the fields of the specs that built them."""
        return differences(self.get(before), self.get(after))

    def manifest(self, reference: str) -> TokenManifest:
        """Returns the manifest of a version. Raises ConflictError if the version's location now contains another
        dataset.
        """
        version = self.get(reference)
        if sha256_of(version.spec.location) != version.spec.sha256:
            raise ConflictError(
                f"{version.spec.location} holds another dataset than {version.id} now.",
                hint="Build each version to a folder of its own to keep them all.",
            )
        return load_manifest(version.spec.location)


def _parsed(reference: str) -> tuple[str, int | None]:
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise UsageError(f"{reference[:200]!r} names no version of a dataset.", hint="Write NAME or NAME:VERSION.")
    return found[1], None if found[2] is None else int(found[2])


def _row(dataset: RegisteredDataset) -> tuple[object, ...]:
    spec = dataset.newest.spec
    return dataset.name, dataset.team, dataset.versions, spec.documents, spec.tokens
