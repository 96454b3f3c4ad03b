"""Finds the nodes of replicas with several members, by their placement groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from raytide.core import ray_internals
from raytide.core.ray_internals import GroupRecord


class SpanningGroups:
    """Finds the placement groups of replicas by name.

    Ray never forgets a removed group, so its list grows with every group that was ever made. The list is read only for
    a name whose group is not known. Known groups are read one by one.
    """

    def __init__(
        self,
        records: Callable[[], Sequence[GroupRecord]] = ray_internals.group_records,
        record: Callable[[str], GroupRecord | None] = ray_internals.group_record,
    ) -> None:
        self._records, self._record = records, record
        self._ids: dict[str, str] = {}
        """The ids of the groups that the last look asked for, by name."""

    def look(self) -> Callable[[str], tuple[str, ...]]:
        """Returns a function that maps the name of a group to the nodes of its bundles, as Ray's node ids. It reads the
        list of groups at most once.
        """
        known, self._ids = self._ids, {}
        found = self._ids

        @cache
        def listed() -> dict[str, GroupRecord]:
            return {record.name: record for record in self._records() if record.state != "REMOVED"}

        def nodes_of(name: str) -> tuple[str, ...]:
            record = self._record(known[name]) if name in known else None
            if record is None or record.state == "REMOVED":
                record = listed().get(name)
            if record is None:
                return ()
            found[name] = record.id
            return record.nodes

        return nodes_of
