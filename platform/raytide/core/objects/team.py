"""A team: what it may hold, borrow and lend, and what it may spend. Teams form a tree under one unnamed root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, model_validator

from raytide.core.config import Config

CLASSES: Mapping[str, int] = {"low": 0, "normal": 100, "high": 200}
"""The priority classes of a cluster that names none of its own; a higher number goes first."""


class Budget(Config):
    """Dollars a calendar month (UTC)."""

    soft_usd: float | None = Field(default=None, ge=0)
    """Beyond it: spot nodes only, and nothing borrowed."""
    hard_usd: float | None = Field(default=None, ge=0)
    """Beyond it: nothing is admitted, and what runs and may be preempted checkpoints and gives way."""

    @model_validator(mode="after")
    def _order(self) -> Budget:
        if self.soft_usd is not None and self.hard_usd is not None and self.soft_usd > self.hard_usd:
            raise ValueError(f"soft_usd {self.soft_usd:g} is above hard_usd {self.hard_usd:g}")
        return self


class TeamSpec(Config):
    """`metadata.raytide.teams.<name>`. What `raytide quota set` and `raytide budget set` set goes before it, amount by
    amount, until they reset it.

    Quotas count a resource by Ray's name (`GPU`, `CPU`) or accelerators by their type's (`H100`).
    """

    parent: str = ""
    """The team that it belongs to; the root when empty. The configuration alone says it."""
    weight: float = Field(default=1.0, gt=0)
    """Its part in the fair share."""
    quota: dict[str, float] = Field(default_factory=dict)
    """Its own, which others may use while it does not."""
    borrow: dict[str, float] = Field(default_factory=dict)
    """How much more than its own it may hold while others leave it unused; no limit where a resource is left out."""
    lend: dict[str, float] = Field(default_factory=dict)
    """How much of its own others may use; all of it where a resource is left out."""
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _amounts(self) -> TeamSpec:
        for what in ("quota", "borrow", "lend"):
            if bad := sorted(name for name, amount in getattr(self, what).items() if amount < 0):
                raise ValueError(f"{what} of {bad[0]} is negative")
        return self


def merged(spec: TeamSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec with those that were given since: amounts one by one, the rest whole."""
    fields = spec.model_dump(mode="json")
    for name, value in given.items():
        is_part = isinstance(value, Mapping) and isinstance(fields.get(name), Mapping)
        fields[name] = {**fields[name], **value} if is_part else value
    return fields


def overlaid(spec: TeamSpec, given: Mapping[str, Any]) -> TeamSpec:
    """The spec that holds. Each part was checked when it was given; what a file says later cannot make it fail."""
    known = {name: value for name, value in given.items() if name in TeamSpec.model_fields and name != "parent"}
    fields = merged(spec, known)
    return TeamSpec.model_construct(**{**fields, "budget": Budget.model_construct(**fields["budget"])})


@dataclass(frozen=True, slots=True)
class Team:
    """A team as the queue sees it now."""

    name: str
    spec: TeamSpec = field(default_factory=TeamSpec)
    recent_gpu_s: float = 0.0
    """What it has used, older use counting half for every `HALF_LIFE_S`; for the fair share."""
    spent_micro_usd: int = 0
    """This month."""


HALF_LIFE_S = 7 * 86400.0


def decayed_usage(gpu_s: float, age_s: float) -> float:
    """What use that old still counts."""
    return gpu_s * float(0.5 ** (max(0.0, age_s) / HALF_LIFE_S))


def check_tree(teams: Mapping[str, TeamSpec]) -> None:
    """ValueError when a parent is not there or a team is its own ancestor."""
    for name in teams:
        line, at = [name], teams[name].parent
        while at:
            if at not in teams:
                raise ValueError(f"team {line[-1]} has the parent {at}, which is no team")
            if at in line:
                raise ValueError(f"team {name} is its own ancestor: {' -> '.join([*line, at])}")
            line.append(at)
            at = teams[at].parent
