"""Ray's list of placement groups, which only grows, is not read for groups that are known."""

from __future__ import annotations

from dataclasses import dataclass, field

from raytide.actors.serving.ray_serve.spanning import SpanningGroups
from raytide.core.ray_internals import GroupRecord


@dataclass
class Ray:
    groups: list[GroupRecord] = field(default_factory=list)
    lists: int = 0

    def records(self) -> list[GroupRecord]:
        self.lists += 1
        return self.groups

    def record(self, id: str) -> GroupRecord | None:
        return next((each for each in self.groups if each.id == id), None)


def test_the_list_is_read_only_for_a_group_that_is_not_known() -> None:
    ray = Ray([GroupRecord("a", "1", "REMOVED", ("old",)), GroupRecord("a", "2", "PENDING", ())])
    groups = SpanningGroups(ray.records, ray.record)
    look = groups.look()
    assert (look("a"), look("none"), ray.lists) == ((), (), 1)
    ray.groups[1] = GroupRecord("a", "2", "CREATED", ("n1", "n2"))
    assert (groups.look()("a"), ray.lists) == (("n1", "n2"), 1)
    ray.groups += [GroupRecord("b", "3", "CREATED", ("n3",))]
    look = groups.look()
    assert (look("a"), look("b"), ray.lists) == (("n1", "n2"), ("n3",), 2)
    ray.groups[1] = GroupRecord("a", "2", "REMOVED", ("n1", "n2"))
    assert (groups.look()("a"), ray.lists) == ((), 3)
    assert SpanningGroups(ray.records, ray.record).look()("b") == ("n3",)
