"""The nodes of a snapshot by what a decision about endpoints asks of them: one walk for all endpoints."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raytide.core.objects.node import NodeState
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot
from raytide.scheduling.replicas import departing_nodes
from raytide.scheduling.unattributed import UnattributedUsage

COMING = (NodeState.REQUESTED, NodeState.LAUNCHING, NodeState.READY)


@dataclass(frozen=True, slots=True)
class EndpointHosts:
    nodes: Sequence[NodeView]
    leaving: frozenset[str]
    """Ray's ids of those on which no replica stays."""
    unattributed: UnattributedUsage
    spare: Counter[str]
    """How many of each type could still go before there are fewer than its `min_nodes`: what an endpoint gives up is
    taken off."""
    _at: Mapping[str, int]
    """By Ray's id."""
    _bought_for: Mapping[str, Sequence[int]]
    """By endpoint."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> EndpointHosts:
        at, bought_for, spare = {}, defaultdict(list), Counter[str]()
        for number, view in enumerate(snapshot.nodes):
            if view.node.ray_node_id:
                at[view.node.ray_node_id] = number
            bought_for[view.node.subject].append(number)
            spare[view.node.type] += view.node.state in COMING
        spare.subtract({node_type.name: node_type.min_nodes for node_type in snapshot.node_types})
        return cls(snapshot.nodes, departing_nodes(snapshot), UnattributedUsage(snapshot), spare, at, bought_for)

    def hosting(self, view: EndpointView) -> list[NodeView]:
        """Those on which its replicas are, and those that were bought for it."""
        seats = view.load.replica_nodes if view.load else ()
        found = {self._at[seat] for seat in seats if seat in self._at} | {*self._bought_for.get(view.endpoint.name, ())}
        return [self.nodes[number] for number in sorted(found)]
