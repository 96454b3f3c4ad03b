"""Placement groups on a real Ray with 4 CPUs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.ray_fixture import own_ray

import raytide
from raytide.actors.gang import placement_groups
from raytide.actors.gang.placement_groups import (
    GroupKey,
    PlacementGroupInfo,
    PlacementGroups,
    WantedGroup,
    difference,
    placement_group_of,
)
from raytide.core.errors import ClusterError
from raytide.core.objects.gang import Member, MemberState

pytestmark = pytest.mark.cluster

ADDRESS = "127.0.88.1"
CREATE_AND_DIE = """
import os, signal, sys
import ray
ray.init(address=sys.argv[1], namespace="raytide", log_to_driver=False)
from raytide.actors.gang.placement_groups import GroupKey, WantedGroup
from raytide.actors.gang.placement_groups import PlacementGroups
PlacementGroups().create([WantedGroup(GroupKey("lease-1", i, 0), sys.argv[2], {"CPU": 1.0}) for i in range(2)])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(next(iter(raytide.__path__))).parent))
        with own_ray(ADDRESS, cpus=4) as ray:
            yield ray


@pytest.fixture
def groups(ray: Any) -> Iterator[PlacementGroups]:
    groups = PlacementGroups()
    yield groups
    groups.remove(groups.list().values())


def until(
    groups: PlacementGroups, what: str, holds: Callable[[Mapping[GroupKey, PlacementGroupInfo]], bool]
) -> Mapping[GroupKey, PlacementGroupInfo]:
    deadline = time.monotonic() + 240.0
    while not holds(there := groups.list()):
        assert time.monotonic() < deadline, f"waited 240 s for {what}; there are {there}"
        time.sleep(0.05)
    return there


def wanted(ray: Any, lease: str, *cpus: float) -> dict[GroupKey, WantedGroup]:
    here = ray.get_runtime_context().get_node_id()
    keys = [GroupKey(lease, index, 0) for index in range(len(cpus))]
    return {key: WantedGroup(key, here, {"CPU": amount}) for key, amount in zip(keys, cpus, strict=True)}


def test_groups_outlive_the_kill_of_their_maker_and_are_found_by_name(ray: Any, groups: PlacementGroups) -> None:
    here = ray.get_runtime_context()
    maker = subprocess.run(
        [sys.executable, "-c", CREATE_AND_DIE, here.gcs_address, here.get_node_id()],
        check=False,
        capture_output=True,
        timeout=300,
    )
    assert maker.returncode == -signal.SIGKILL, maker.stderr.decode()
    keys = {GroupKey("lease-1", 0, 0), GroupKey("lease-1", 1, 0)}
    there = until(groups, "two ready groups", lambda there: {k for k, g in there.items() if g.state == "ready"} >= keys)
    assert difference(wanted(ray, "lease-1", 1.0, 1.0), there) == ((), ())
    ids = {key: there[key].placement_group_id for key in keys}
    groups.create(wanted(ray, "lease-1", 1.0, 1.0).values())
    assert {key: groups.list()[key].placement_group_id for key in keys} == ids, "creating again makes nothing new"

    @ray.remote(num_cpus=1)
    def where() -> str | None:
        found = ray.util.get_current_placement_group()
        return found.id.hex() if found else None

    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    member = Member(0, MemberState.READY, placement_group_id=ids[GroupKey("lease-1", 0, 0)])
    strategy = PlacementGroupSchedulingStrategy(placement_group_of(member), 0, placement_group_capture_child_tasks=True)
    assert ray.get(where.options(scheduling_strategy=strategy).remote(), timeout=180) == member.placement_group_id

    groups.remove(groups.list().values())
    until(groups, "their removal", lambda there: all(there[k].state == "removed" for k in keys if k in there))
    groups.remove([PlacementGroupInfo(GroupKey("lease-1", 0, 0), "ready", ids[GroupKey("lease-1", 0, 0)])])


def test_a_group_without_room_is_pending_and_becomes_ready_when_there_is(ray: Any, groups: PlacementGroups) -> None:
    need = wanted(ray, "lease-2", 3.0, 3.0)
    groups.create(need.values())
    there = until(groups, "one ready group", lambda there: "ready" in {there[k].state for k in need if k in there})
    (ready,) = [there[key] for key in need if there[key].state == "ready"]
    (pending,) = [there[key] for key in need if there[key].state == "pending"]
    groups.remove([ready])
    until(groups, "the other one", lambda there: there[pending.key].state == "ready")


def test_a_group_on_a_node_that_is_not_there_stays_pending_and_holds_nothing(ray: Any, groups: PlacementGroups) -> None:
    key = GroupKey("lease-3", 0, 0)
    groups.create([WantedGroup(key, "ab" * 28, {"CPU": 4.0})])
    fits = wanted(ray, "lease-4", 4.0)
    groups.create(fits.values())
    there = until(
        groups, "the group that fits", lambda there: all(k in there and there[k].state == "ready" for k in fits)
    )
    assert there[key].state == "pending"


def test_a_name_that_was_removed_can_be_made_again(ray: Any, groups: PlacementGroups) -> None:
    need = wanted(ray, "lease-5", 1.0)
    (key,) = need
    groups.create(need.values())
    first = until(groups, "the group", lambda there: key in there and there[key].state == "ready")[key]
    groups.remove([first])
    until(groups, "its removal", lambda there: key not in there or there[key].state == "removed")
    groups.create(need.values())
    second = until(groups, "its successor", lambda there: key in there and there[key].state == "ready")[key]
    assert second.placement_group_id != first.placement_group_id


def test_the_groups_of_a_long_list_are_read_one_by_one(
    ray: Any, groups: PlacementGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_groups, "SHORT", -1)
    monkeypatch.setattr(placement_groups, "READ_AS_ONE", 0)
    need = wanted(ray, "lease-6", 1.0)
    (key,) = need
    groups.list()
    groups.create(need.values())
    made = until(groups, "the group", lambda there: key in there and there[key].state == "ready")
    assert made.keys() == {key}
    groups.remove(made.values())
    until(groups, "its removal", lambda there: there[key].state == "removed")


def test_foreign_groups_are_left_alone(ray: Any, groups: PlacementGroups) -> None:
    foreign = ray.util.placement_group([{"CPU": 1}], name="somebody's")
    try:
        assert foreign.wait(180)
        assert "somebody's" not in {key.name for key in groups.list()}
    finally:
        ray.util.remove_placement_group(foreign)


def test_a_member_without_a_group_has_no_bundle() -> None:
    with pytest.raises(ClusterError, match="member 3 has no placement group"):
        placement_group_of(Member(3))
