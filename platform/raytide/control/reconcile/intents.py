"""Writes a plan's intents into the records. The records are stored before any intent is carried out."""

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
from raytide.queue.lifecycle import jobs, leases


def record_intents(records: ClusterRecords, plan: Plan, node_types: Mapping[str, NodeType]) -> None:
    """Applies the plan's intents to the records. An idle drain is not an intent, because Ray may refuse it."""
    now_s = plan.at_s
    before = tuple(records.nodes.values())
    assigned: dict[str, dict[int, str]] = {}
    for action in plan.actions:
        match action:
            case Admit(job_id=job_id, lease=lease):
                records.jobs[job_id] = jobs.admitted(
                    records.jobs[job_id], action.reason, now_s, action.reserved_micro_usd
                )
                records.leases[lease.id] = lease
            case Shrink() | Preempt() | Grow():
                records.leases[action.lease_id] = leases.apply_action(records.leases[action.lease_id], action, now_s)
                if isinstance(action, Preempt):
                    records.jobs[action.job_id] = replace(records.jobs[action.job_id], reason=action.reason)
                if isinstance(action, Preempt | Shrink):
                    records.jobs[action.job_id] = on_preemption(records.jobs[action.job_id], action.by, now_s)
            case Launch():
                records.nodes[action.node_id] = lifecycle.requested(action, node_types[action.node_type], now_s)
            case Assign(lease_id=lease_id, member=member, node_id=node_id):
                assigned.setdefault(lease_id, {})[member] = node_id
            case Unassign(lease_id=lease_id, member=member):
                records.leases[lease_id] = leases.unassign(records.leases[lease_id], member)
            case Requeue(job_id=job_id, lease_id=lease_id, reason=reason):
                records.leases[lease_id] = leases.release(records.leases[lease_id], reason)
                records.jobs[job_id] = jobs.requeued(records.jobs[job_id], reason)
            case Scale(endpoint=name):
                records.endpoints[name] = targets.scaled(records.endpoints[name], action)
            case Drain(kind="notice", node_id=node_id, deadline_s=deadline_s, reason=reason):
                node = records.nodes[node_id]
                if node.state in (NodeState.READY, NodeState.DRAINING):
                    records.nodes[node_id] = replace(
                        node, state=NodeState.DRAINING, drain_deadline_s=deadline_s, reason=reason
                    )
            case Terminate(node_id=node_id):
                records.nodes[node_id] = lifecycle.terminating(records.nodes[node_id], action)
    for lease_id, nodes in assigned.items():
        records.leases[lease_id] = leases.assign(records.leases[lease_id], nodes)
    for pool in launch_backoff.update_pools(tuple(records.pools.values()), before, records.nodes.values(), now_s):
        records.pools[(pool.node_type, pool.zone)] = pool
