"""The start-up time of an endpoint's replicas, measured from the endpoint's own starts.

If a node was bought for a replica, the start lasts from the purchase to the replica's first report. On an existing
node, it lasts from the first sight of the replica's process to the first report. The estimate is a high quantile of the
latest starts, because an estimate that is too low costs more than one that is too high.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raytide.core.config import Config
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.objects.node import Node

ENOUGH, MOST = 5, 50
"""The number of starts that an estimate needs, and the number of the latest starts that are kept."""
QUANTILE = 0.9
AT_ONCE_S = 60.0
"""A replica counts as the one that its node was bought for only if its process starts within this time after the node
is ready; a later one has waited for something else.
"""
LONGEST_S = 6 * 3600.0
"""The longest interval that counts as a start."""
FORGET_S = 600.0
"""The longest silence of a replica; one that reports after a longer silence has restarted."""


class Start(Config):
    node_type: str
    is_bought: bool
    """True if the node was bought for this replica."""
    seconds: float


@dataclass(slots=True)
class StartMeter:
    """Measures the start-up times of one endpoint's replicas."""

    starts: deque[Start] = field(default_factory=lambda: deque(maxlen=MOST))
    _last_report: dict[str, tuple[str, float]] | None = None
    """Node and time of the last report by replica id; None before the first call."""
    _starting: dict[str, list[float | None]] = field(default_factory=dict)
    """The times at which replicas that have not reported yet were first seen, by node; None for those that ran before
    the first call.
    """

    @property
    def cold_start_s(self) -> float | None:
        """The start-up time in seconds, estimated from recent starts. None if there are fewer than ENOUGH starts to
        estimate from.

        If some recent starts needed a newly bought node, the estimate uses only those starts. Their time includes
        the purchase of the node.
        """
        bought = [start.seconds for start in self.starts if start.is_bought]
        seen = bought or [start.seconds for start in self.starts]
        return float(np.quantile(seen, QUANTILE)) if len(seen) >= ENOUGH else None

    def observe(self, load: EndpointLoad, hosts: Mapping[str, Node], endpoint: str) -> None:
        """Records the replica starts that a load report shows. `hosts` maps Ray's node ids to nodes."""
        before = self._last_report
        last_report = {} if before is None else before
        new = [replica for replica in load.replicas if replica.id not in last_report]
        for replica in new if before is not None else ():
            waiting = self._starting.get(replica.node)
            since_s, host = waiting.pop(0) if waiting else None, hosts.get(replica.node)
            if since_s is not None and host is not None:
                is_first = all(node != replica.node for node, _ in last_report.values())
                self._took(since_s, replica.at_s, host, is_bought=is_first and host.subject == endpoint)
        reports = {**last_report, **{replica.id: (replica.node, replica.at_s) for replica in load.replicas}}
        self._last_report = {id: (node, at_s) for id, (node, at_s) in reports.items() if load.at_s - at_s <= FORGET_S}
        answering = Counter(node for node, _ in self._last_report.values())
        node_counts, at_s = Counter(load.replica_nodes), None if before is None else load.at_s
        for node in {*node_counts, *self._starting}:
            known, count = self._starting.pop(node, []), node_counts[node] - answering[node]
            if count > 0:
                self._starting[node] = (known + [at_s] * count)[:count]

    def _took(self, since_s: float, until_s: float, host: Node, *, is_bought: bool) -> None:
        ready_s = host.ready_at_s
        is_bought = is_bought and ready_s is not None and since_s - ready_s <= AT_ONCE_S
        seconds = until_s - (host.requested_at_s if is_bought else since_s)
        if since_s < until_s and 0.0 < seconds <= LONGEST_S:
            self.starts.append(Start(node_type=host.type, is_bought=is_bought, seconds=seconds))
