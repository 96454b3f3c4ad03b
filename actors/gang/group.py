"""A member's placement group as raytide wants it and as Ray has it. Plain data: nothing here imports ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raytide.core.objects.node import Resources

_PREFIX = "raytide"

GroupState = Literal["pending", "ready", "removed"]


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Which seat, and which filling of it: an incarnation is never filled twice, so a name never comes back."""

    lease_id: str
    member: int
    incarnation: int

    @property
    def name(self) -> str:
        return f"{_PREFIX}/{self.lease_id}/{self.member}/{self.incarnation}"

    @classmethod
    def of_name(cls, name: str) -> GroupKey | None:
        """None for a placement group that is not raytide's."""
        parts = name.split("/")
        if len(parts) != 4 or parts[0] != _PREFIX or not (parts[2].isdigit() and parts[3].isdigit()):
            return None
        return cls(parts[1], int(parts[2]), int(parts[3]))


@dataclass(frozen=True, slots=True)
class WantedGroup:
    """One bundle with these resources on this Ray node."""

    key: GroupKey
    ray_node_id: str
    resources: Resources


@dataclass(frozen=True, slots=True)
class PlacementGroupInfo:
    key: GroupKey
    state: GroupState
    placement_group_id: str
    """Hex."""


def difference(
    wanted: Mapping[GroupKey, WantedGroup], there: Mapping[GroupKey, PlacementGroupInfo]
) -> tuple[tuple[WantedGroup, ...], tuple[PlacementGroupInfo, ...]]:
    """What to create and what to remove, so that Ray has what is wanted."""
    create = tuple(group for key, group in wanted.items() if key not in there)
    remove = tuple(group for key, group in there.items() if key not in wanted and group.state != "removed")
    return create, remove
