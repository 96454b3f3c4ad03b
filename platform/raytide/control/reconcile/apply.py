"""Make the world match the records: launches, drains, terminations, placement groups, drivers, endpoints.

Level-triggered: everything is derived from the records and a look at the world, so whatever a crash or a failed call
left undone is done by the next tick. Returns what only the doing could tell: refused launches and accepted drains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from raytide.actors.gang.placement_groups import difference
from raytide.autoscaler.nodes import lifecycle
from raytide.autoscaler.nodes.lifecycle import overdue
from raytide.control.reconcile.observation import ClusterObservation, Sources
from raytide.control.reconcile.records import ClusterRecords
from raytide.core.errors import ProviderError
from raytide.core.logs import logger
from raytide.core.objects.node import Node, NodeState, NodeType
from raytide.core.objects.plan import Drain, Plan
from raytide.jobs.lifecycle.jobs import wanted_drivers
from raytide.jobs.lifecycle.leases import wanted_groups

log = logger(__name__)

MOST_GROUPS, MOST_DRIVERS = 512, 32
"""The placement groups and drivers that one pass asks for: each is a call to Ray, and the pass waits for it."""


@dataclass(slots=True)
class ApplyResult:
    nodes: dict[str, Node] = field(default_factory=dict)
    """Nodes whose record changed by the doing."""
    refusals: dict[tuple[str, str], str] = field(default_factory=dict)
    """Pools that gave no node, in the provider's words: they are not asked again in this pass."""
    errors: list[str] = field(default_factory=list)


def apply(
    book: ClusterRecords,
    plan: Plan,
    world: ClusterObservation,
    sources: Sources,
    node_types: Mapping[str, NodeType],
    now_s: float,
) -> ApplyResult:
    """Do what is due. A call that fails is reported and tried again by the next tick; the others go on."""
    result = ApplyResult()

    def attempt(what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # any outside system may fail in any way
            log.warning("action failed", extra={"what": what, "error": str(error)})
            result.errors.append(f"{what}: {error}")

    if world.machines is not None:
        due = overdue(book.nodes.values(), world.machines)
        for node in due.launch:
            if refusal := result.refusals.get((node.type, node.zone)):
                result.nodes[node.id] = lifecycle.refused(node, refusal, now_s)  # the first one was the probe
                continue
            attempt(f"launch {node.id}", partial(_launch, node, sources, node_types, result, now_s))
        for node_id in due.terminate:
            attempt(f"terminate {node_id}", partial(sources.provider.terminate, node_id))
    for action in plan.actions:
        if isinstance(action, Drain):
            attempt(f"drain {action.node_id}", partial(_drain, book, action, sources, result))
    if world.groups is not None:
        create, remove = difference(wanted_groups(book.leases.values()), world.groups)
        if remove:
            attempt("remove placement groups", partial(sources.groups.remove, remove))
        if create:
            attempt("create placement groups", partial(sources.groups.create, create[:MOST_GROUPS]))
    if world.drivers is not None:
        wanted = wanted_drivers(book.jobs.values())
        for key in sorted(wanted - world.drivers.keys(), key=str)[:MOST_DRIVERS]:
            attempt(f"start the driver of {key.job_id}", partial(sources.drivers.start, key))
        for key, status in world.drivers.items():
            if status.state == "running" and key not in wanted:
                attempt(f"stop the driver of {key.job_id}", partial(sources.drivers.stop, key))
    if world.ray_nodes is not None:
        attempt("report to Ray", partial(sources.gcs.report, tuple(book.nodes.values())))
    return result


def _launch(
    node: Node, sources: Sources, node_types: Mapping[str, NodeType], result: ApplyResult, now_s: float
) -> None:
    node_type = node_types.get(node.type)
    if node_type is None:
        result.nodes[node.id] = lifecycle.refused(
            node, f"the configuration has no node type {node.type} any more", now_s
        )
        return
    try:
        sources.provider.launch(node, node_type)
    except ProviderError as error:
        result.nodes[node.id] = lifecycle.refused(node, str(error), now_s)
        result.refusals[(node.type, node.zone)] = str(error)


def _drain(book: ClusterRecords, action: Drain, sources: Sources, result: ApplyResult) -> None:
    node = book.nodes[action.node_id]
    if not node.ray_node_id or node.state not in (NodeState.READY, NodeState.DRAINING):
        return
    accepted = sources.gcs.drain(node.ray_node_id, action.kind, action.deadline_s, action.reason)
    if accepted and action.kind == "idle":
        result.nodes[node.id] = lifecycle.drained(node, action)
