from __future__ import annotations

import pytest

from raytide.actors.gang import placement_groups
from raytide.actors.gang.placement_groups import SHORT, SURVEY_S, GroupKey, PlacementGroups, WantedGroup
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError
from raytide.core.ray_internals import GroupRecord


class Ray:
    """Ray's records of placement groups, none of which Ray ever forgets."""

    def __init__(self, removed: int) -> None:
        self.by_id = {f"{n:036x}": GroupRecord(key(n).name, f"{n:036x}", "REMOVED", ()) for n in range(removed)}
        self.surveys = 0
        self.clock = VirtualClock()
        self.groups = PlacementGroups(self.records, self.by_id.get, self.clock.now_s)

    def records(self) -> list[GroupRecord]:
        self.surveys += 1
        return list(self.by_id.values())

    def make(self, group: WantedGroup) -> str:
        if any(record.name == group.key.name and record.state != "REMOVED" for record in self.by_id.values()):
            raise ValueError("the name already exists")
        id = f"{len(self.by_id):036x}"
        self.by_id[id] = GroupRecord(group.key.name, id, "CREATED", (group.ray_node_id,))
        return id

    def remove(self, id: str) -> None:
        self.by_id[id] = self.by_id[id]._replace(state="REMOVED")

    def states(self) -> dict[GroupKey, str]:
        return {key: group.state for key, group in self.groups.list().items()}


def key(number: int) -> GroupKey:
    return GroupKey(f"lease-{number}", 0, 0)


def wanted(number: int) -> WantedGroup:
    return WantedGroup(key(number), "ab" * 28, {"CPU": 1.0})


def test_groups_that_ray_does_not_forget_are_not_read_in_every_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(removed=SHORT + 100)
    monkeypatch.setattr(placement_groups, "_ask_for", ray.make)
    living = ray.make(wanted(900_001))
    assert ray.states()[key(900_001)] == "ready"
    ray.groups.create([wanted(900_002), wanted(900_001)])
    assert ray.states() == {key(900_001): "ready", key(900_002): "ready"}
    ray.remove(living)
    for _ in range(100):
        assert ray.states() == {key(900_001): "removed", key(900_002): "ready"}, "its member learns of it"
    assert ray.surveys == 1
    ray.make(wanted(900_003))  # by a former controller
    assert key(900_003) not in ray.states()
    ray.clock.sleep(SURVEY_S)
    assert ray.states()[key(900_003)] == "ready"
    assert ray.states() == {key(900_001): "removed", key(900_002): "ready", key(900_003): "ready"}, "not lost at once"
    ray.clock.sleep(SURVEY_S)
    ray.states()
    assert ray.states() == {key(900_002): "ready", key(900_003): "ready"}
    assert ray.surveys == 3


def test_a_group_that_ray_refuses_because_it_exists_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(removed=SHORT + 100)
    monkeypatch.setattr(placement_groups, "_ask_for", ray.make)
    ray.states()
    ray.make(wanted(900_001))  # the answer to its request was lost
    with pytest.raises(ClusterError, match="already exists"):
        ray.groups.create([wanted(900_001)])
    assert ray.states()[key(900_001)] == "ready"


def test_a_short_list_is_read_in_every_tick() -> None:
    ray = Ray(removed=3)
    for number in range(3):
        ray.make(wanted(900_000 + number))
        assert ray.states()[key(900_000 + number)] == "ready"
    assert ray.surveys == 3
