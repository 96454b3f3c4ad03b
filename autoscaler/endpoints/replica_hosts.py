"""Indexes of a snapshot's nodes for decisions about endpoints. One pass over the nodes builds them for all
endpoints.
"""

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
    """Ray's ids of the nodes on which no replica stays."""
    unattributed: UnattributedUsage
    spare: Counter[str]
    """Nodes of each type above its `min_nodes`, less those that endpoints release."""
    _at: Mapping[str, int]
    """Node index by Ray's id."""
    _bought_for: Mapping[str, Sequence[int]]
    """Node indexes by endpoint."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> EndpointHosts:
        index, bought_for, spare = {}, defaultdict(list), Counter[str]()
        for number, view in enumerate(snapshot.nodes):
            if view.node.ray_node_id:
                index[view.node.ray_node_id] = number
            bought_for[view.node.subject].append(number)
            spare[view.node.type] += view.node.state in COMING
        spare.subtract({node_type.name: node_type.min_nodes for node_type in snapshot.node_types})
        return cls(snapshot.nodes, departing_nodes(snapshot), UnattributedUsage(snapshot), spare, index, bought_for)

    def hosting(self, view: EndpointView) -> list[NodeView]:
        """Returns the nodes that host replicas of the endpoint, and the nodes that were bought for the endpoint."""
        ray_ids = view.load.replica_nodes if view.load else ()
        found = {*self._bought_for.get(view.endpoint.name, ())}
        found |= {self._at[ray_id] for ray_id in ray_ids if ray_id in self._at}
        return [self.nodes[number] for number in sorted(found)]
