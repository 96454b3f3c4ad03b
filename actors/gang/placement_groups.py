"""Lists, creates and removes placement groups, without waiting for Ray to place them.

Each group is detached, so that it outlives the process that made it. The lease's id is in the group's name, so that a
later process can find the group. The group has one bundle, which is pinned to one node by id. Ray therefore does not
choose the node, nor move the bundle when the node dies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from raytide.core.errors import ClusterError
from raytide.core.io.timeout import call_with_timeout
from raytide.core.objects.gang import Member, Shape
from raytide.core.objects.node import Resources

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_NODE_ID_LABEL = "ray.io/node-id"
_STATES: dict[str, GroupState] = {"CREATED": "ready", "REMOVED": "removed"}


LIST_TIMEOUT_S = 5.0


class PlacementGroups:
    """Creates, lists and removes the placement groups of leases.

    Needs a process that is connected to Ray.
    """

    def list(self) -> dict[GroupKey, PlacementGroupInfo]:
        """Returns raytide's placement groups by key. The result includes removed groups for as long as Ray remembers
        them. Raises WaitTimeoutError if Ray does not answer within LIST_TIMEOUT_S seconds.
        """
        table = call_with_timeout(LIST_TIMEOUT_S, "the GCS to list placement groups", _table)
        groups = [group for info in table.values() if (group := _group(info)) is not None]
        # A group removed by hand and its successor may have the same name; the living one counts.
        return {group.key: group for group in sorted(groups, key=lambda g: g.state != "removed")}

    def create(self, wanted: Iterable[WantedGroup]) -> None:
        """Asks Ray for the wanted groups that do not exist yet. If Ray refuses a group, the others are still requested.

        After that, raises ClusterError with the first refusal, if any.
        """
        existing = self.list()
        refused: list[tuple[GroupKey, Exception]] = []
        for group in wanted:
            if group.key in existing and existing[group.key].state != "removed":
                continue
            try:
                _ask_for(group)
            except Exception as error:  # Ray checks a request in many places, each with its own kind of error
                refused.append((group.key, error))
        if refused:
            key, first = refused[0]
            raise ClusterError(f"Ray refused {len(refused)} placement groups, of them {key.name}: {first}") from first

    def remove(self, groups: Iterable[PlacementGroupInfo]) -> None:
        """Removes groups. Ray kills what runs in them. Groups that are already gone are ignored."""
        from ray.util.placement_group import remove_placement_group

        for group in groups:
            remove_placement_group(_handle(group.placement_group_id))


def placement_group_of(member: Member) -> PlacementGroup:
    """Returns the placement group of a usable member. The group has one bundle, with index 0 and all of the member's
    resources.
    """
    if not member.placement_group_id:
        raise ClusterError(
            f"member {member.index} has no placement group yet.", hint="Use the members of `Lease.usable`."
        )
    return _handle(member.placement_group_id)


def member_options(member: Member, shape: Shape) -> dict[str, object]:
    """Returns the arguments of Ray's `.options(...)` for an actor or task that takes all of a member's resources."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    rest = dict(shape.resources)
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=placement_group_of(member),
        placement_group_bundle_index=0,
        placement_group_capture_child_tasks=True,
    )
    whole: dict[str, object] = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0)}
    if memory := rest.pop("memory", 0):
        whole["memory"] = memory
    return {"scheduling_strategy": strategy, **whole, **({"resources": rest} if rest else {})}


def _ask_for(group: WantedGroup) -> None:
    from ray.util.placement_group import placement_group

    placement_group(
        [dict(group.resources)],
        strategy="PACK",
        name=group.key.name,
        lifetime="detached",
        bundle_label_selector=[{_NODE_ID_LABEL: group.ray_node_id}],
    )


def _handle(placement_group_id: str) -> PlacementGroup:
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(placement_group_id)))


def _table() -> dict[str, dict[str, Any]]:
    from ray.util.placement_group import placement_group_table

    return dict(placement_group_table())


def _group(info: dict[str, Any]) -> PlacementGroupInfo | None:
    key = GroupKey.of_name(info["name"])
    return (
        None
        if key is None
        else PlacementGroupInfo(key, _STATES.get(info["state"], "pending"), info["placement_group_id"])
    )


_PREFIX = "raytide"
_NAME = re.compile(rf"{_PREFIX}/(lease-[0-9]+)/([0-9]{{1,9}})/([0-9]{{1,9}})")

GroupState = Literal["pending", "ready", "removed"]


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The name of a placement group, made of the lease, the member and the member's incarnation. Each incarnation is
    placed only once, so no name is used twice.
    """

    lease_id: str
    member: int
    incarnation: int

    @property
    def name(self) -> str:
        return f"{_PREFIX}/{self.lease_id}/{self.member}/{self.incarnation}"

    @classmethod
    def of_name(cls, name: str) -> GroupKey | None:
        """Returns the key that a placement group's name contains, or None if the group is not raytide's."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True)
class WantedGroup:
    """A placement group that Ray should have: one bundle with these resources on this Ray node."""

    key: GroupKey
    ray_node_id: str
    resources: Resources


@dataclass(frozen=True, slots=True)
class PlacementGroupInfo:
    key: GroupKey
    state: GroupState
    placement_group_id: str
    """The id of the placement group, in hex."""


def difference(
    wanted: Mapping[GroupKey, WantedGroup], existing: Mapping[GroupKey, PlacementGroupInfo]
) -> tuple[tuple[WantedGroup, ...], tuple[PlacementGroupInfo, ...]]:
    """Returns the groups to create and the groups to remove. With these changes, Ray has exactly the wanted groups."""
    create = tuple(group for key, group in wanted.items() if key not in existing)
    remove = tuple(group for key, group in existing.items() if key not in wanted and group.state != "removed")
    return create, remove
