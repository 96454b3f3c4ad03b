"""Computes each holder's share of each node from a Snapshot. A holder is a job or an endpoint.

A holder's weight is its dominant share of the node: a job with 1 of 8 CPUs and 4 of 8 GPUs has the weight 0.5. The
unused rest of the node is another share: idle, start-up or waste. The weights of a node normally sum to one. They sum
to more than one if holders dominate different resources, and each holder then pays in proportion to its weight.

A gang member holds resources from the moment it is assigned to a node, even before it uses them. For a short time after
a release, processes that are ending still use resources. The former holder pays for this use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from raytide.core.objects.ledger_entry import EntryKind, Occupancy, Share
from raytide.core.objects.node import NodeState, Resources, minus, plus
from raytide.core.objects.plan import UNMANAGED
from raytide.core.objects.snapshot import NodeView, Snapshot

Holder = tuple[EntryKind, str, str]
"""A holder: the kind of the entry, the subject and the team."""
Held = Mapping[str, Mapping[Holder, Resources]]
"""Resources by node id and holder."""

_OBJECT_STORE = "object_store_memory"
"""The resource of Ray's object store. It is not counted as use of a node, because objects outlive the work that made
them.
"""
_NOISE = 1e-6
"""The largest amount that counts as a rounding error; Ray counts in ten-thousandths."""
GRACE_S = 30.0
"""The seconds after a release for which unexplained usage counts as the former holder's."""


def occupancies(snapshot: Snapshot, left: Held | None = None) -> dict[str, Occupancy]:
    """Returns the occupancy of every node, by node id.

    `left` contains recently released resources that Ray may still report as used.
    """
    held, left = holders(snapshot), left or {}
    return {
        view.node.id: _occupancy(view, held.get(view.node.id, {}), left.get(view.node.id, {}))
        for view in snapshot.nodes
    }


def holders(snapshot: Snapshot) -> Held:
    """Returns the resources that each lease and each endpoint holds on each node. Resources count even if they are not
    in use.
    """
    held: defaultdict[str, dict[Holder, Resources]] = defaultdict(dict)
    team_of = {job.id: job.spec.team for job in snapshot.jobs}
    for lease in snapshot.leases:
        holder = (EntryKind.JOB, lease.job_id, team_of.get(lease.job_id, ""))
        for member in lease.members:
            if member.has_node:
                on_node = held[member.node_id]
                on_node[holder] = plus(on_node.get(holder, {}), lease.shape.resources)
    id_of = {view.node.ray_node_id: view.node.id for view in snapshot.nodes if view.node.ray_node_id}
    for endpoint_view in snapshot.endpoints:
        endpoint = endpoint_view.endpoint
        holder = (EntryKind.ENDPOINT, endpoint.name, endpoint.spec.team)
        for ray_node_id in endpoint_view.load.replica_nodes if endpoint_view.load else ():
            if ray_node_id in id_of:
                on_node = held[id_of[ray_node_id]]
                on_node[holder] = plus(on_node.get(holder, {}), endpoint.spec.resources)
    return held


def _occupancy(view: NodeView, held: Mapping[Holder, Resources], left: Mapping[Holder, Resources]) -> Occupancy:
    if view.node.ready_at_s is None:
        # the future holders pay for the start, as a separate kind
        shares = [
            Share(EntryKind.STARTUP, subject, team, _weight(need, view.total))
            for (_, subject, team), need in held.items()
        ]
        return _whole(shares, EntryKind.STARTUP)
    used = minus(view.total, view.available)
    for need in held.values():
        used = minus(used, need)
    still_used = _still_used(left, used)
    for use in still_used.values():
        used = minus(used, use)
    all_held = {holder: plus(held.get(holder, {}), still_used.get(holder, {})) for holder in {**held, **still_used}}
    shares = [Share(kind, subject, team, _weight(need, view.total)) for (kind, subject, team), need in all_held.items()]
    foreign = _weight({name: amount for name, amount in used.items() if name != _OBJECT_STORE}, view.total)
    if foreign > _NOISE:
        shares.append(Share(EntryKind.UNMANAGED, "", UNMANAGED, foreign))
    is_leaving = view.node.state in (NodeState.DRAINING, NodeState.TERMINATING)
    return _whole(shares, EntryKind.WASTE if is_leaving else EntryKind.IDLE)


def _still_used(left: Mapping[Holder, Resources], used: Resources) -> dict[Holder, Resources]:
    """Returns the part of each former holder's released resources that is still in use.

    `used` is the usage that present holders do not explain.
    """
    found: dict[Holder, Resources] = {}
    for holder, resources in left.items():
        use = {name: amount for name, have in resources.items() if (amount := min(have, used.get(name, 0.0))) > _NOISE}
        if use:
            found[holder], used = use, minus(used, use)
    return found


def _whole(shares: list[Share], rest: EntryKind) -> Occupancy:
    """Returns the occupancy: the shares, and the rest of the node as a further share of the kind `rest`, sorted."""
    left = round(1.0 - sum(share.weight for share in shares), 9)
    if left > _NOISE:
        shares = [*shares, Share(rest, "", "", left)]
    return tuple(sorted((share for share in shares if share.weight > 0), key=lambda s: (s.kind, s.subject)))


def _weight(need: Resources, total: Resources) -> float:
    """Returns the dominant share of `need` in `total`, at most one; rounded so that equal occupancies compare equal."""
    shares = [amount / total[name] for name, amount in need.items() if total.get(name, 0.0) > 0]
    return round(min(1.0, max(shares, default=0.0)), 9)


@dataclass(frozen=True, slots=True)
class _Released:
    resources: Resources
    until_s: float


@dataclass(frozen=True, slots=True)
class RecentlyReleased:
    """Resources that were released recently and may still be in use.

    They are kept in memory only, so a restarted controller starts with none. Call `observe` at each tick, and pass
    `held` to `occupancies`.
    """

    before: Held = field(default_factory=dict)
    released: Mapping[tuple[str, Holder], _Released] = field(default_factory=dict)

    @property
    def held(self) -> Held:
        held: dict[str, dict[Holder, Resources]] = {}
        for (node_id, holder), released in self.released.items():
            held.setdefault(node_id, {})[holder] = released.resources
        return held

    def observe(self, now: Held, now_s: float) -> RecentlyReleased:
        """Returns the updated record. The updated record includes the resources that were released since the last call.
        It leaves out resources that were released more than `GRACE_S` seconds ago.
        """
        left = {key: released for key, released in self.released.items() if now_s < released.until_s}
        for node_id, holders in self.before.items():
            for holder, previous in holders.items():
                rest = minus(previous, now.get(node_id, {}).get(holder, {}))
                if less := {name: amount for name, amount in rest.items() if amount > 0}:
                    key = (node_id, holder)
                    earlier = left[key].resources if key in left else {}
                    left[key] = _Released(plus(earlier, less), now_s + GRACE_S)
        return RecentlyReleased(now, left)
