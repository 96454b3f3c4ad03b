"""The differences of two versions of models, or of datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raytide.core.specs.data import DatasetVersion
from raytide.core.specs.model_version import ModelVersion

Version = ModelVersion | DatasetVersion


@dataclass(frozen=True, slots=True)
class FieldChange:
    field: str
    """`lineage.config.optim.lr`"""
    before: object
    after: object


def differences(before: Version, after: Version) -> tuple[FieldChange, ...]:
    """Returns the fields whose values differ, by name; a missing value is None. Team, user and time do not count."""
    a, b = (dict(_leaves(each.spec.model_dump(mode="json", exclude={"team"}))) for each in (before, after))
    changed = sorted(field for field in a.keys() | b.keys() if a.get(field) != b.get(field))
    return tuple(FieldChange(field, a.get(field), b.get(field)) for field in changed)


def _leaves(value: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner
