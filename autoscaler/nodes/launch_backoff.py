"""Counts the failed launches of each pool (a node type in a zone) since its last success. After each failure, the pool
waits twice as long as before, at most LONGEST_BACKOFF_S seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from raytide.autoscaler.nodes.lifecycle import was_cancelled
from raytide.core.objects.node import Node, NodeState
from raytide.core.objects.snapshot import Pool

FIRST_BACKOFF_S = 30.0
LONGEST_BACKOFF_S = 1800.0

_COMING = (NodeState.REQUESTED, NodeState.LAUNCHING)
_LOST = (NodeState.TERMINATING, NodeState.GONE)


def after_failure(pool: Pool, now_s: float, reason: str) -> Pool:
    failures = pool.failures + 1
    return replace(pool, failures=failures, retry_at_s=now_s + _backoff_s(failures), reason=reason)


def after_success(pool: Pool, requested_at_s: float) -> Pool:
    """Returns the pool after one of its nodes has joined. The returned pool has no failures.

    `requested_at_s` is the time at which the node was requested. If the node was requested before the pool's last
    failure, returns the pool unchanged.
    """
    if pool.failures and requested_at_s <= pool.retry_at_s - _backoff_s(pool.failures):
        return pool
    return Pool(pool.node_type, pool.zone)


def update_pools(
    pools: Sequence[Pool], before: Iterable[Node], now_nodes: Iterable[Node], now_s: float
) -> tuple[Pool, ...]:
    """Returns the pools after the nodes changed from `before` to `now_nodes`. Store the result together with the nodes.

    A node that has joined counts as a success of its pool. A node that will never join counts as a failure. Several
    failures of a pool in one call count as one.
    """
    table = {(pool.node_type, pool.zone): pool for pool in pools}
    was = {node.id: node.state for node in before}
    changed = [n for n in now_nodes if was.get(n.id) in _COMING and n.state not in _COMING]
    for node in changed:
        if node.state not in _LOST:
            key = (node.type, node.zone)
            table[key] = after_success(table.get(key, Pool(*key)), node.requested_at_s)
    failed = [node for node in changed if node.state in _LOST and not was_cancelled(node)]
    for key, reason in {(node.type, node.zone): node.reason for node in failed}.items():
        table[key] = after_failure(table.get(key, Pool(*key)), now_s, reason)
    return tuple(table[key] for key in sorted(table))


def _backoff_s(failures: int) -> float:
    return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 10))
