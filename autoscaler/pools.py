"""The launch history of each (node type, zone): after a failure it rests, twice as long after each further one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from raytide.core.fleet import Node, NodeState
from raytide.core.snapshot import Pool

FIRST_REST_S = 30.0
LONGEST_REST_S = 1800.0

_COMING = (NodeState.REQUESTED, NodeState.LAUNCHING)
_LOST = (NodeState.TERMINATING, NodeState.GONE)


def after_failure(pool: Pool, now_s: float, reason: str) -> Pool:
    rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(pool.failures, 10))
    return replace(pool, failures=pool.failures + 1, retry_at_s=now_s + rest_s, reason=reason)


def after_success(pool: Pool) -> Pool:
    return Pool(pool.node_type, pool.zone)


def after(pools: Sequence[Pool], before: Iterable[Node], now_nodes: Iterable[Node], now_s: float) -> tuple[Pool, ...]:
    """The pools once `before` has become `now_nodes`: a node that joined is a success, one that never will a failure.

    Several failures at one instant are one: they say the same thing. Persist the result with the nodes, in one go.
    """
    table = {(pool.node_type, pool.zone): pool for pool in pools}
    was = {node.id: node.state for node in before}
    changed = [(was[n.id], n) for n in now_nodes if was.get(n.id) in _COMING and n.state not in _COMING]
    joined = {(n.type, n.zone) for _, n in changed if n.state not in _LOST}
    failed = {(n.type, n.zone): n.reason for _, n in changed if n.state in _LOST}
    for key in sorted(joined):
        table[key] = after_success(Pool(*key))
    for key in sorted(failed.keys() - joined):
        table[key] = after_failure(table.get(key, Pool(*key)), now_s, failed[key])
    return tuple(table[key] for key in sorted(table))
