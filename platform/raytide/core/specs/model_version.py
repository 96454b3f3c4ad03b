"""Registered models: immutable versions with their lineage, and aliases whose history is kept."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, StringConstraints, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.errors import ConfigError
from raytide.core.io.html import ShownAsHtml

SCHEME = "registry:"
_NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
_ALIAS = r"[a-z][a-z0-9_-]{0,62}"
_REFERENCE = re.compile(rf"({_NAME})(?::([0-9]{{1,9}})|@({_ALIAS}))")

ModelName = Annotated[str, StringConstraints(pattern=rf"^{_NAME}$")]
Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class MetricRule(Config):
    """The condition on one metric that a model version must meet to be promoted. A limit that is left out does not
    apply."""

    better: Literal["higher", "lower"]
    limit: float | None = None
    """The value that must be reached, regardless of the champion's value."""
    gain: float | None = None
    """The least improvement over the champion, in the metric's units; a negative one allows that much regression."""

    @model_validator(mode="after")
    def _asks_something(self) -> MetricRule:
        if self.limit is None and self.gain is None:
            raise ValueError("give limit or gain")
        return self


class PromotionRule(Config):
    """The rule of `raytide model promote --rule`: conditions that must all hold before a version is promoted."""

    metrics: dict[bounds.Name, MetricRule] = Field(default_factory=dict, max_length=bounds.MOST_LABELS)
    """The conditions on the metrics with which both versions were registered."""
    online: Literal["ignored", "not_worse", "better"] = "not_worse"
    """The result that the last A/B test of both versions must have: `not_worse` if the champion did not win, `better`
    if the challenger won.
    """


class ModelReference(NamedTuple):
    """A reference to a model version by its number or by an alias: `chat:3`, `chat@champion`."""

    name: str
    version: int | None = None
    alias: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the reference in a text `NAME:VERSION` or `NAME@ALIAS`. The text may have the prefix `registry:`."""
        found = _REFERENCE.fullmatch(text.removeprefix(SCHEME))
        if found is None:
            raise ConfigError(
                f"{text[:200]!r} names no version of a registered model.", hint="Write NAME:VERSION or NAME@ALIAS."
            )
        name, version, alias = found.groups()
        return cls(name, None if version is None else int(version), alias or "")

    def __str__(self) -> str:
        return f"{self.name}:{self.version}" if self.version is not None else f"{self.name}@{self.alias}"


class Lineage(Config):
    """The origin of a model: its job, its data and its base model. An empty field is unknown."""

    job: bounds.Word = ""
    """The training job that exported it."""
    dataset: bounds.Location = ""
    dataset_sha256: Annotated[str, StringConstraints(pattern="^([0-9a-f]{64})?$")] = ""
    """The SHA-256 of the dataset's manifest, which contains the SHA-256 of each of its shards."""
    base: bounds.Location = ""
    """The model from whose weights the training started."""
    code: bounds.Word = ""
    """The version of the code that trained it."""
    config: dict[str, object] = Field(default_factory=dict)
    """The configuration of the training."""


class ModelVersionSpec(Config):
    """The request of `raytide model register`: a directory of weights to register under a name."""

    name: ModelName
    team: bounds.Name = "default"
    location: bounds.Location = Field(min_length=1)
    """A Hugging Face directory: a path that every node can read, or the URL of an object store."""
    sha256: Sha256
    """The digest of its files; see `raytide.registry.content_digest`."""
    lineage: Lineage = Lineage()
    metrics: dict[bounds.Name, float] = Field(default_factory=dict, max_length=bounds.MOST_LABELS)
    """Results of evaluations."""
    note: bounds.Word = ""


@dataclass(frozen=True, slots=True)
class ModelVersion(ShownAsHtml):
    """A registered version of a model, which never changes."""

    spec: ModelVersionSpec
    version: int
    user: str
    created_at_s: float

    @property
    def id(self) -> str:
        return f"{self.spec.name}:{self.version}"


class AliasSpec(Config):
    """The request of `raytide model promote`: the version to which an alias should point."""

    version: int | None = Field(ge=1, le=10**9)
    """The version; None removes the alias."""
    why: bounds.Word = ""
    if_version: int | None = Field(default=None, ge=0, le=10**9)
    """The version to which the alias must point now, or 0 for none; otherwise nothing is changed. By default it may
    point to any.
    """
    rule: PromotionRule | None = None
    """The rule that this version must meet in comparison with the version to which the alias points now; otherwise
    nothing is changed.
    """


@dataclass(frozen=True, slots=True)
class AliasChange(ShownAsHtml):
    """One change of an alias, as the history of aliases records it."""

    number: int
    name: str
    alias: str
    before: int | None
    """The version to which the alias pointed before; None if it did not exist."""
    after: int | None
    at_s: float
    user: str
    why: str


@dataclass(frozen=True, slots=True)
class RegisteredModel(ShownAsHtml):
    """A registered model: its newest version, and the version to which each of its aliases points."""

    name: str
    team: str
    versions: int
    newest: ModelVersion
    aliases: dict[str, int] = field(default_factory=dict)
