"""Write a plan into the records: the intents that are persisted before anything is done about them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raytide.autoscaler.endpoints import targets
from raytide.autoscaler.nodes import launch_backoff, lifecycle
from raytide.control.accounting.lost_work import on_preemption
from raytide.control.reconcile.records import ClusterRecords
from raytide.core.objects.node import NodeState, NodeType
from raytide.core.objects.plan import (
    Admit,
    Assign,
    Drain,
    Grow,
    Launch,
    Plan,
    Preempt,
    Requeue,
    Scale,
    Shrink,
    Terminate,
    Unassign,
)
from raytide.jobs.lifecycle import jobs, leases


def record_intents(book: ClusterRecords, plan: Plan, node_types: Mapping[str, NodeType]) -> None:
    """Apply every action that is an intent. An idle drain is not one: Ray may still refuse it."""
    now_s = plan.at_s
    before = tuple(book.nodes.values())
    assigned: dict[str, dict[int, str]] = {}
    for action in plan.actions:
        match action:
            case Admit(job_id=job_id, lease=lease):
                book.jobs[job_id] = jobs.admitted(book.jobs[job_id], action.reason, now_s, action.reserved_micro_usd)
                book.leases[lease.id] = lease
            case Shrink() | Preempt() | Grow():
                book.leases[action.lease_id] = leases.apply_action(book.leases[action.lease_id], action, now_s)
                if isinstance(action, Preempt):
                    book.jobs[action.job_id] = replace(book.jobs[action.job_id], reason=action.reason)
                if isinstance(action, Preempt | Shrink):
                    book.jobs[action.job_id] = on_preemption(book.jobs[action.job_id], action.by, now_s)
            case Launch():
                book.nodes[action.node_id] = lifecycle.requested(action, node_types[action.node_type], now_s)
            case Assign(lease_id=lease_id, member=member, node_id=node_id):
                assigned.setdefault(lease_id, {})[member] = node_id
            case Unassign(lease_id=lease_id, member=member):
                book.leases[lease_id] = leases.unassign(book.leases[lease_id], member)
            case Requeue(job_id=job_id, lease_id=lease_id, reason=reason):
                book.leases[lease_id] = leases.release(book.leases[lease_id], reason)
                book.jobs[job_id] = jobs.requeued(book.jobs[job_id], reason)
            case Scale(endpoint=name):
                book.endpoints[name] = targets.scaled(book.endpoints[name], action)
            case Drain(kind="notice", node_id=node_id, deadline_s=deadline_s, reason=reason):
                node = book.nodes[node_id]
                if node.state in (NodeState.READY, NodeState.DRAINING):
                    book.nodes[node_id] = replace(
                        node, state=NodeState.DRAINING, drain_deadline_s=deadline_s, reason=reason
                    )
            case Terminate(node_id=node_id):
                book.nodes[node_id] = lifecycle.terminating(book.nodes[node_id], action)
    for lease_id, nodes in assigned.items():
        book.leases[lease_id] = leases.assign(book.leases[lease_id], nodes)
    for pool in launch_backoff.update_pools(tuple(book.pools.values()), before, book.nodes.values(), now_s):
        book.pools[(pool.node_type, pool.zone)] = pool
