"""Registered models in the SDK: `rt.connect().models`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from raytide.control.client import ApiClient
from raytide.core.errors import DataError
from raytide.core.io.html import ShownList
from raytide.core.io.storage import join, local_path, read_bytes, sha256
from raytide.core.io.token_dataset import MANIFEST
from raytide.core.specs.model_version import (
    SCHEME,
    AliasChange,
    AliasSpec,
    Lineage,
    ModelReference,
    ModelVersion,
    ModelVersionSpec,
    PromotionRule,
    RegisteredModel,
)
from raytide.registry.content_digest import ContentDigest, digest_of_directory, digest_to_compare
from raytide.registry.lineage import FieldChange, differences, exported_model

_JOB = re.compile("job-[0-9]+")


class ModelRegistry:
    """The registered models of a cluster. A model reference is `NAME:VERSION` or `NAME@ALIAS`."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def all(self, *, limit: int = 100, offset: int = 0) -> list[RegisteredModel]:
        """Returns the registered models in order of name, each with its newest version and its aliases."""
        found = self._client.models(limit=limit, offset=offset)
        return ShownList(found, "registered models", ("model", "team", "versions", "newest", "aliases"), _model_row)

    def get(self, reference: str) -> ModelVersion:
        """Returns the version to which a reference points."""
        return self._client.model_version(ModelReference.parse(reference))

    def register(
        self,
        name: str,
        source: str | Path,
        *,
        job: str = "",
        metrics: Mapping[str, float] | None = None,
        note: str = "",
        team: str = "",
    ) -> ModelVersion:
        """Registers a new version of a model. `source` is a model directory, or a training job (`job-7`) that exported
        a model.

        `job` names the job that produced a model directory. The files are read on this machine to compute their digest.
        """
        location = str(source)
        if not job and _JOB.fullmatch(location):
            job = location
            location = exported_model(self._client.job(job).job)
        if (path := local_path(location)) is not None:
            location = str(Path(path).resolve())
        lineage = Lineage(job=job, dataset_sha256=self._digest_of_dataset(job) if job else "")
        fields = {
            "name": name,
            "location": location,
            "sha256": digest_of_directory(location).sha256,
            "lineage": lineage,
            "metrics": dict(metrics or {}),
            "note": note,
            **({"team": team} if team else {}),
        }
        return self._client.register_model(ModelVersionSpec.parse(fields, where="model"))

    def promote(
        self,
        reference: str,
        alias: str,
        *,
        why: str = "",
        if_version: int | None = None,
        rule: PromotionRule | None = None,
    ) -> AliasChange:
        """Points an alias at this version.

        `if_version` is the version at which the alias must point now, or 0 if the alias must not exist. `rule`
        compares the new version with the version at which the alias points now. Raises ConflictError if the alias
        does not point at `if_version`, or if the new version does not satisfy `rule`.
        """
        version = self.get(reference)
        change = AliasSpec(version=version.version, why=why, if_version=if_version, rule=rule)
        return self._client.promote(version.spec.name, alias, change)

    def remove_alias(self, name: str, alias: str, *, why: str = "") -> AliasChange:
        return self._client.promote(name, alias, AliasSpec(version=None, why=why))

    def history(
        self, name: str, *, alias: str | None = None, until_s: float | None = None, limit: int = 100
    ) -> list[AliasChange]:
        """Returns changes of the model's aliases, the newest first. With `until_s`, returns only changes up to that
        time.
        """
        found = self._client.model_history(name, alias=alias, until_s=until_s, limit=limit)
        return ShownList(found, f"aliases of {name}", ("alias", "before", "after", "user", "why"), _change_row)

    def diff(self, before: str, after: str) -> tuple[FieldChange, ...]:
        """Returns the fields in which two versions differ."""
        return differences(self.get(before), self.get(after))

    def verify(self, reference: str) -> ContentDigest:
        """Reads the files of a version again and returns their digest. Raises DataError if the files have changed since
        they were registered.
        """
        version = self.get(reference)
        found = digest_to_compare(version.spec.location, version.spec.sha256)
        if found.sha256 != version.spec.sha256:
            raise DataError(
                f"the files at {version.spec.location} are not those of {version.id}: "
                f"their digest is {found.sha256[:12]}, not {version.spec.sha256[:12]}.",
                hint="Restore them, or register them as a new version.",
            )
        return found

    def _digest_of_dataset(self, job: str) -> str:
        """Returns the SHA-256 of the manifest of the dataset that a job read; empty if the job read none, or if the
        manifest cannot be read."""
        dataset = self._client.job(job).job.spec.config.get("dataset")
        try:
            return sha256(read_bytes(join(dataset, MANIFEST))) if isinstance(dataset, str) else ""
        except DataError:
            return ""


def _model_row(model: RegisteredModel) -> tuple[object, ...]:
    return model.name, model.team, model.versions, model.newest.id, model.aliases


def _change_row(change: AliasChange) -> tuple[object, ...]:
    return change.alias, change.before, change.after, change.user, change.why


def named_model(model: str, name: str = "") -> dict[str, object]:
    """Returns the fields `name` and `model` of a ServeSpec. By default the name is that of the model directory or of
    the registered model.
    """
    if model.startswith(SCHEME):
        return {"name": name or ModelReference.parse(model).name, "model": model}
    return {"name": name or Path(model).name.removesuffix(".gguf").lower(), "model": model}
