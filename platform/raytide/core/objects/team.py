"""Teams with their quotas, budgets, and limits on borrowing and lending. The teams form a tree under one unnamed
root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, model_validator

from raytide.core.config import Config

CLASSES: Mapping[str, int] = {"low": 0, "normal": 100, "high": 200}
"""The default priority classes; a higher number goes first."""


class Budget(Config):
    """A budget in dollars per calendar month (UTC)."""

    soft_usd: float | None = Field(default=None, ge=0)
    """The dollars from which the team gets spot nodes only, and borrows no quota."""
    hard_usd: float | None = Field(default=None, ge=0)
    """The dollars from which nothing of the team is admitted, and its preemptible jobs are preempted after a
    checkpoint.
    """

    @model_validator(mode="after")
    def _order(self) -> Budget:
        if self.soft_usd is not None and self.hard_usd is not None and self.soft_usd > self.hard_usd:
            raise ValueError(f"soft_usd {self.soft_usd:g} is above hard_usd {self.hard_usd:g}")
        return self


class TeamSpec(Config):
    """The section `metadata.raytide.teams.<name>`. `raytide quota set` and `raytide budget set` override single amounts
    of the section, until the overrides are reset.

    The name of a quota is a Ray resource (`GPU`, `CPU`) or a type of accelerator (`H100`). The quota limits the
    team's use of this resource or type.
    """

    parent: str = ""
    """The parent team; empty for the root. It is set by the configuration only."""
    weight: float = Field(default=1.0, gt=0)
    """The team's weight in the fair share."""
    quota: dict[str, float] = Field(default_factory=dict)
    """The team's nominal quota, which other teams may use while this one does not."""
    borrow: dict[str, float] = Field(default_factory=dict)
    """The most that it may borrow; unlimited for resources left out."""
    lend: dict[str, float] = Field(default_factory=dict)
    """The part of its quota that others may borrow; all of it for resources left out."""
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _amounts(self) -> TeamSpec:
        for what in ("quota", "borrow", "lend"):
            if bad := sorted(name for name, amount in getattr(self, what).items() if amount < 0):
                raise ValueError(f"{what} of {bad[0]} is negative")
        return self


def merged(spec: TeamSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a spec, overridden by the fields in `given`. Mappings are overridden key by key, and other
    fields as a whole."""
    fields = spec.model_dump(mode="json")
    for name, value in given.items():
        is_part = isinstance(value, Mapping) and isinstance(fields.get(name), Mapping)
        fields[name] = {**fields[name], **value} if is_part else value
    return fields


def overlaid(spec: TeamSpec, given: Mapping[str, Any]) -> TeamSpec:
    """Applies the stored overrides to the team's spec from the file, and returns the result. The overrides were
    validated when they were set, and are not validated again. A later change of the file thus cannot make them fail.
    """
    known = {name: value for name, value in given.items() if name in TeamSpec.model_fields and name != "parent"}
    fields = merged(spec, known)
    return TeamSpec.model_construct(**{**fields, "budget": Budget.model_construct(**fields["budget"])})


@dataclass(frozen=True, slots=True)
class Team:
    """A team as the queue sees it: its limits and its usage."""

    name: str
    spec: TeamSpec = field(default_factory=TeamSpec)
    recent_gpu_s: float = 0.0
    """Recent GPU-seconds, halved for every `HALF_LIFE_S` of age; for the fair share."""
    spent_micro_usd: int = 0
    """This month's cost in micro-dollars."""


HALF_LIFE_S = 7 * 86400.0


def decayed_usage(gpu_s: float, age_s: float) -> float:
    """Returns the part of a usage, in GPU-seconds, that still counts after `age_s` seconds. Usage decays with time."""
    return gpu_s * float(0.5 ** (max(0.0, age_s) / HALF_LIFE_S))


def check_tree(teams: Mapping[str, TeamSpec]) -> None:
    """Raises ValueError if a parent does not exist or a team is its own ancestor."""
    for name in teams:
        line, at = [name], teams[name].parent
        while at:
            if at not in teams:
                raise ValueError(f"team {line[-1]} has the parent {at}, which is no team")
            if at in line:
                raise ValueError(f"team {name} is its own ancestor: {' -> '.join([*line, at])}")
            line.append(at)
            at = teams[at].parent
