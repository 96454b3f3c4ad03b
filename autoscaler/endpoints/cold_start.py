"""How long an endpoint's replicas take to start, learned from its own starts: from the order of the node that was
bought for one to its first answer, and from the first sight of its process on a node that was there.

A high quantile of the last ones counts: replicas that are asked for must be expected late rather than early.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raytide.core.config import Config
from raytide.core.objects.endpoint import EndpointLoad
from raytide.core.objects.node import Node

ENOUGH, MOST = 5, 50
"""Starts: so many must have been seen, so many of the last are remembered."""
QUANTILE = 0.9
AT_ONCE_S = 60.0
"""Its process starts that soon on a node that was bought for it; later it waited for something else."""
LONGEST_S = 6 * 3600.0
"""What seems to have taken longer was no start."""
FORGET_S = 600.0
"""Who was silent for that long and speaks again has started anew."""


class Start(Config):
    node_type: str
    is_bought: bool
    """Its node was bought for it; else the node was there."""
    seconds: float


@dataclass(slots=True)
class StartMeter:
    """Of one endpoint."""

    starts: deque[Start] = field(default_factory=lambda: deque(maxlen=MOST))
    _last_report: dict[str, tuple[str, float]] | None = None
    """By replica that answers, its node and when it last said so; None before the first look."""
    _starting: dict[str, list[float | None]] = field(default_factory=dict)
    """By node: since when each replica that does not answer yet was seen there; None: since before the first look."""

    @property
    def cold_start_s(self) -> float | None:
        """Of nodes that must be bought; of those that are there where none ever was. None until enough were seen."""
        bought = [start.seconds for start in self.starts if start.is_bought]
        seen = bought or [start.seconds for start in self.starts]
        return float(np.quantile(seen, QUANTILE)) if len(seen) >= ENOUGH else None

    def observe(self, load: EndpointLoad, hosts: Mapping[str, Node], endpoint: str) -> None:
        """`hosts`: by Ray's id of the node."""
        before = self._last_report
        spoke = {} if before is None else before
        new = [replica for replica in load.replicas if replica.id not in spoke]
        for replica in new if before is not None else ():
            waiting = self._starting.get(replica.node)
            since_s, host = waiting.pop(0) if waiting else None, hosts.get(replica.node)
            if since_s is not None and host is not None:
                is_first = all(node != replica.node for node, _ in spoke.values())
                self._took(since_s, replica.at_s, host, is_bought=is_first and host.subject == endpoint)
        said = {**spoke, **{replica.id: (replica.node, replica.at_s) for replica in load.replicas}}
        self._last_report = {id: (node, at_s) for id, (node, at_s) in said.items() if load.at_s - at_s <= FORGET_S}
        answering = Counter(node for node, _ in self._last_report.values())
        there, at_s = Counter(load.replica_nodes), None if before is None else load.at_s
        for node in {*there, *self._starting}:
            known, count = self._starting.pop(node, []), there[node] - answering[node]
            if count > 0:
                self._starting[node] = (known + [at_s] * count)[:count]

    def _took(self, since_s: float, until_s: float, host: Node, *, is_bought: bool) -> None:
        ready_s = host.ready_at_s
        is_bought = is_bought and ready_s is not None and since_s - ready_s <= AT_ONCE_S
        seconds = until_s - (host.requested_at_s if is_bought else since_s)
        if since_s < until_s and 0.0 < seconds <= LONGEST_S:
            self.starts.append(Start(node_type=host.type, is_bought=is_bought, seconds=seconds))
