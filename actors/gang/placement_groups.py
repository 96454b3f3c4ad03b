"""Lists, creates and removes placement groups, without waiting for Ray to place them.

Each group is detached, so that it outlives the process that made it. The lease's id is in the group's name, so that a
later process can find the group. The group has one bundle, which is pinned to one node by id. Ray therefore does not
choose the node, nor move the bundle when the node dies.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from raytide.core import ray_internals
from raytide.core.errors import ClusterError, WaitTimeoutError
from raytide.core.io.timeout import call_with_timeout
from raytide.core.objects.gang import Member, Shape
from raytide.core.objects.node import Resources

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_NODE_ID_LABEL = "ray.io/node-id"
_STATES: dict[str, GroupState] = {"CREATED": "ready", "REMOVED": "removed"}


LIST_TIMEOUT_S, LAST_TIMEOUT_S = 5.0, 20.0
"""The time limit of a listing, in seconds. After a timeout the next survey may take twice as long, up to the second
limit.
"""
SURVEY_S = 600.0
"""The time between two surveys of a long list, in seconds."""
SHORT, READ_AS_ONE = 2000, 30
"""A list with more records than the first number, and this many times as many records as living groups, is long: its
living groups are read one by one.
"""


class PlacementGroups:
    """Creates, lists and removes the placement groups of leases.

    Needs a process that is connected to Ray. Ray never forgets a removed group, so its list grows by every member of
    every gang. Once the list is long, it is read only now and then (a survey), to find groups that another process
    made. In between, only the groups that lived at the last survey, or were made since, are read.
    """

    def __init__(
        self,
        records: Callable[[], Sequence[ray_internals.GroupRecord]] = ray_internals.group_records,
        record: Callable[[str], ray_internals.GroupRecord | None] = ray_internals.group_record,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records, self._record, self._monotonic_s = records, record, monotonic_s
        self._known: dict[GroupKey, str] = {}
        """The ids of the groups to read between two surveys."""
        self._over: frozenset[GroupKey] = frozenset()
        """The groups in `_known` that were removed before the last survey; the next survey drops them."""
        self._survey_at_s, self._survey_timeout_s = -math.inf, LIST_TIMEOUT_S

    def list(self) -> dict[GroupKey, PlacementGroupInfo]:
        """Returns raytide's placement groups by key. The result includes groups that were removed lately. Raises
        WaitTimeoutError if Ray does not answer in time.
        """
        what = "the GCS to list placement groups"
        if self._monotonic_s() < self._survey_at_s:
            known = tuple(self._known.values())
            return _by_key(call_with_timeout(LIST_TIMEOUT_S, what, lambda: [self._record(each) for each in known]))
        try:
            records = call_with_timeout(self._survey_timeout_s, what, self._records)
        except WaitTimeoutError:
            self._survey_timeout_s = min(2 * self._survey_timeout_s, LAST_TIMEOUT_S)
            raise
        self._survey_timeout_s = LIST_TIMEOUT_S
        groups = _by_key(records)
        living = {key: group.placement_group_id for key, group in groups.items() if group.state != "removed"}
        over = {key: id for key, id in self._known.items() if key not in living and key not in self._over}
        self._known, self._over = {**over, **living}, frozenset(over)
        is_long = len(records) > SHORT + READ_AS_ONE * len(living)
        self._survey_at_s = self._monotonic_s() + SURVEY_S if is_long else -math.inf
        return groups

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
                self._known[group.key] = _ask_for(group)
            except Exception as error:  # Ray checks a request in many places, each with its own kind of error
                refused.append((group.key, error))
                self._survey_at_s = -math.inf  # it may exist already
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


def _ask_for(group: WantedGroup) -> str:
    """Asks Ray for the group, and returns the group's id in hex."""
    from ray.util.placement_group import placement_group

    made = placement_group(
        [dict(group.resources)],
        strategy="PACK",
        name=group.key.name,
        lifetime="detached",
        bundle_label_selector=[{_NODE_ID_LABEL: group.ray_node_id}],
    )
    return str(made.id.hex())


def _handle(placement_group_id: str) -> PlacementGroup:
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(placement_group_id)))


def _by_key(records: Iterable[ray_internals.GroupRecord | None]) -> dict[GroupKey, PlacementGroupInfo]:
    """Returns raytide's groups among the records. A group that was removed by hand and its successor may have the same
    name; the living one counts.
    """
    groups = [group for each in records if each is not None and (group := _group(each)) is not None]
    return {group.key: group for group in sorted(groups, key=lambda g: g.state != "removed")}


def _group(record: ray_internals.GroupRecord) -> PlacementGroupInfo | None:
    key = GroupKey.of_name(record.name)
    return None if key is None else PlacementGroupInfo(key, _STATES.get(record.state, "pending"), record.id)


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
