"""Explains why something cannot be placed. It names the first unmet constraint, and the smallest change that would meet
the constraint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raytide.core.clock import utc
from raytide.core.errors import CapacityError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.node import ACCELERATOR_LABEL, NodeType, Resources, fits, labels_match, round_up_gpu_share
from raytide.core.objects.snapshot import Snapshot
from raytide.scheduling.offerings import Offerings


@dataclass(frozen=True, slots=True)
class Unschedulable:
    """The reason why something cannot be placed, with the kind of the unmet constraint:

    - `impossible`: no fleet of these node types could hold it.
    - `capacity`: other jobs and endpoints hold the nodes.
    - `stock`: the pools that could supply the nodes have refused, and are not asked again for some time.
    - `budget`: buying the needed nodes would exceed a price limit or a budget.
    - `rate`: too many nodes were launched within a minute.
    - `quota`: the team's quota is too small.
    - `behind`: jobs that are ahead in the queue come first. Either the job cannot be preempted and would
      take room for which the head of the queue waits, or too many jobs ahead of it have preempted others
      in this decision.
    - `deadline`: the job still has time to wait for spot nodes.
    """

    constraint: Literal["impossible", "capacity", "stock", "budget", "rate", "quota", "behind", "deadline"]
    reason: str
    remedy: str


def copies_that_fit(need: Resources, free: Resources) -> int:
    """Returns how many times the resources `need` fit into the resources `free`."""
    need = round_up_gpu_share(need)
    return min((int((free.get(name, 0.0) + 1e-9) // amount) for name, amount in need.items() if amount > 0), default=0)


def why_impossible(shape: Shape, count: int, node_types: Sequence[NodeType], subject: str) -> Unschedulable | None:
    """Returns the reason why `count` members could not be placed even in an empty fleet with all pools in stock.
    Returns None if they could be placed there.
    """
    labelled = [t for t in node_types if t.max_nodes > 0 and open_zones(shape, t)]
    if not labelled:
        return _no_labels(shape, node_types, subject)
    capacity = {t.name: copies_that_fit(shape.resources, t.resources) * t.max_nodes for t in labelled}
    if not any(capacity.values()):
        return _too_big(shape, labelled, subject)
    if (most := sum(capacity.values())) < count:
        fleet = ", ".join(f"{t.max_nodes} x {t.name}" for t in labelled if capacity[t.name])
        return Unschedulable(
            "impossible",
            f"no fleet fits {subject}: needs {count} x ({describe_amounts(shape)}) at once; "
            f"the whole fleet holds {most} ({fleet}).",
            f"Ask for {most}, or raise max_nodes.",
        )
    return None


def open_zones(shape: Shape, node_type: NodeType) -> tuple[str, ...]:
    """Returns the zones in which nodes of this type would match the shape's labels."""
    return tuple(z for z in node_type.zones if labels_match(shape.labels, node_type.all_labels(z)))


def describe_amounts(shape: Shape) -> str:
    """Returns the resources of one member as text, accelerators first, such as `8 x H100 + 4 CPU`. The text names the
    accelerator's model if the shape's labels name it.
    """
    ordered = sorted((n for n, amount in shape.resources.items() if amount), key=lambda n: (n != "GPU", n))
    return " + ".join(_amount(name, shape.resources[name], shape.labels) for name in ordered)


def _amount(name: str, amount: float, labels: Mapping[str, str]) -> str:
    model = labels.get(ACCELERATOR_LABEL, "")
    if name == "GPU" and model and not model.startswith(("!", "in(")):
        return f"{amount:g} x {model}"
    if name in ("memory", "object_store_memory"):
        return f"{amount / 2**30:.3g} GiB {name.replace('_', ' ')}"
    return f"{amount:g} {name}"


def _no_labels(shape: Shape, node_types: Sequence[NodeType], subject: str) -> Unschedulable:
    kinds = [t.all_labels(zone) for t in node_types if t.max_nodes for zone in t.zones]
    offered = {key: sorted({labels[key] for labels in kinds if key in labels}) for key in sorted(shape.labels)}
    lacking = [k for k in offered if not any(labels_match({k: shape.labels[k]}, labels) for labels in kinds)]
    wanted = ", ".join(f"{k}={shape.labels[k]}" for k in (lacking[:1] or offered)) or "a node"
    if lacking and offered[lacking[0]]:
        found, advice = f"the fleet has {', '.join(offered[lacking[0]])}", f"Ask for another {lacking[0]}"
    elif offered:
        found, advice = "none has " + ("it" if lacking else "all of them"), "Drop a label"
    else:
        found, advice = "every type has max_nodes 0" if node_types else "the fleet has no node types", "Raise max_nodes"
    return Unschedulable(
        "impossible", f"no node type fits {subject}: needs {wanted}; {found}.", f"{advice}, or add a node type."
    )


def _too_big(shape: Shape, labelled: Sequence[NodeType], subject: str) -> Unschedulable:
    needs = sorted((n for n, amount in shape.resources.items() if amount), key=lambda n: (n != "GPU", n))
    for name in needs:
        largest = max(labelled, key=lambda t: (t.resources.get(name, 0.0), -t.price_micro_usd_h))
        have = largest.resources.get(name, 0.0)
        if have + 1e-9 < shape.resources[name]:
            wanted = _amount(name, shape.resources[name], shape.labels)
            found = f"the largest is {_amount(name, have, shape.labels)} ({largest.name})" if have else "none has any"
            advice = f"Ask for {have:g}" if have and name == needs[0] else f"Ask for less {name}"
            return Unschedulable(
                "impossible",
                f"no node type fits {subject}: needs {wanted} on one node; {found}.",
                f"{advice}, or add a node type.",
            )
    nearest = max(labelled, key=lambda t: (sum(fits({n: shape.resources[n]}, t.resources) for n in needs), t.name))
    return Unschedulable(
        "impossible",
        f"no node type fits {subject}: needs {describe_amounts(shape)} on one node; the nearest is "
        f"{' + '.join(_amount(n, nearest.resources.get(n, 0.0), shape.labels) for n in needs)} ({nearest.name}).",
        "Ask for less on one node, or add a node type.",
    )


class Holders:
    """The names of the jobs and endpoints that hold resources, by the type of the nodes they hold."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._of_type, self._said = _holders(snapshot), dict[tuple[str, ...], list[str]]()

    def of(self, types: tuple[str, ...]) -> list[str]:
        """Returns the names of the jobs and endpoints that hold resources on nodes of any of these types, sorted."""
        if types not in self._said:
            self._said[types] = sorted(set().union(*(self._of_type.get(name, set()) for name in types)))
        return self._said[types]


def _holders(snapshot: Snapshot) -> dict[str, set[str]]:
    type_of = {view.node.id: view.node.type for view in snapshot.nodes}
    type_of_ray = {view.node.ray_node_id: view.node.type for view in snapshot.nodes if view.node.ray_node_id}
    found: dict[str, set[str]] = {name: set() for name in type_of.values()}
    for lease in snapshot.leases:
        for member in lease.members:
            if member.node_id in type_of:
                found[type_of[member.node_id]].add(lease.job_id)
    for view in snapshot.endpoints:
        for node in view.load.replica_nodes if view.load else ():
            if node in type_of_ray:
                found[type_of_ray[node]].add(view.endpoint.name)
    for name, reserved in snapshot.kept.items():
        for node_id, _ in reserved:
            found[type_of[node_id]].add(name)
    return found


def why_not(
    offerings: Offerings, holders: Holders, shape: Shape, count: int, existing: int, subject: str
) -> Unschedulable:
    """Returns the reason why `count` members cannot be placed now, although an empty fleet could hold them.

    `existing` is the number of members that fit on existing and starting nodes.
    """
    holding = offerings.offerings_for(shape)
    types = {offering.node_type.name: (offering.node_type, fit) for offering, fit in holding}
    backed_off = [offering for offering, _ in holding if offerings.retry_at_s(offering) > offerings.at_s]
    available = {offering.node_type.name for offering, _ in holding if offering not in backed_off}
    buyable = {name: max(0, offerings.nodes_left(name)) * fit for name, (_, fit) in types.items()}
    now = existing + sum(members for name, members in buyable.items() if name in available)
    needs = f"needs {count} x ({describe_amounts(shape)}), {min(now, count)} fit now"
    if now < count and now + sum(members for name, members in buyable.items() if name not in available) >= count:
        retry_at_s = min(offerings.retry_at_s(offering) for offering in backed_off)
        out = {name for name, members in buyable.items() if members and name not in available}
        waiting = [offering.name for offering in backed_off if offering.node_type.name in out]
        return Unschedulable(
            "stock",
            f"{subject} waits for nodes: {needs}; the provider had no {', '.join(waiting)}; "
            f"the next attempt is at {utc(retry_at_s)}.",
            "Allow another shape, add a zone or a node type, or wait.",
        )
    is_at_rate = offerings.launches_left is not None and offerings.launches_left <= 0
    if now >= count and not shape.together and is_at_rate:
        rate = f"{offerings.limits.launches_per_min} nodes were launched within a minute (metadata.raytide.limits)"
        return Unschedulable(
            "rate", f"{subject} waits: it {needs}; {rate}.", "No action needed: it continues within a minute."
        )
    if now >= count and not shape.together and (limits := offerings.describe_limits()):
        remedy = "It starts when something else ends. To start now, raise metadata.raytide.limits."
        return Unschedulable("budget", f"{subject} waits: it {needs.partition(',')[0]}; {limits}.", remedy)
    names = " or ".join(types)
    if shape.together:
        where = shape.together.removeprefix("ray.io/")
        needs = f"needs {count} x ({describe_amounts(shape)}) in one {where}; none has room for all of them"
    held = holders.of(tuple(types))
    by = f"; {', '.join(types)} is held by {', '.join(held[:5])}" if held else ""
    more = f" and {len(held) - 5} more" if len(held) > 5 else ""
    return Unschedulable(
        "capacity",
        f"{subject} waits for room: {needs}{by}{more}.",
        f"It starts when they end. To start now, raise max_nodes of {names}.",
    )


def check_possible(spec: GangSpec, node_types: Sequence[NodeType], *, subject: str = "the gang") -> None:
    """Raises CapacityError if none of the gang's shapes would fit even into an empty fleet."""
    never = [why_impossible(shape, shape.at_least, node_types, subject) for shape in spec.shapes]
    if never[0] is not None and all(never):
        raise CapacityError(never[0].reason, hint=never[0].remedy)
