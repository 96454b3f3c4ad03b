"""What it costs when members of gangs leave their nodes on purpose: their gangs go on smaller where they can, and stop
for a checkpoint and a restart where they cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from raytide.autoscaler.nodes.occupancy import NodeOccupancy, Tenants
from raytide.core.objects.gang import Lease, LeaseState, MemberState
from raytide.scheduling.offerings import RESTART_S

NOTICE_S = 60.0
"""How long members work on where they are: for a checkpoint, and for the rest to go on without them."""
STOP_S = 120.0
"""Until a gang that stopped works again: nodes, processes, its checkpoint read."""
REFORM_S = 30.0
"""How long an elastic gang stands still in all when it forms anew, smaller and then whole again."""

_STABLE = (MemberState.READY, MemberState.WAITING, MemberState.PARKED)


@dataclass(frozen=True, slots=True)
class DisruptionCost:
    in_place: bool = True
    """No gang stops: each keeps its minimum."""
    cost_micro_usd: float = 0.0
    """Of the time in which machines of theirs do nothing."""
    lost_h: float = 0.0
    """What of their time goes when one of the nodes to which they move is lost."""
    staying_micro_usd_h: float = 0.0
    """Of what they hold elsewhere."""
    stable_s: float = float("inf")
    """How long all of them have stood as they do, or how long the first has still to run where that is less."""
    description: str = ""


def disruption_cost(roster: NodeOccupancy, olds: Sequence[Tenants], now_s: float) -> DisruptionCost | None:
    """What it is for the gangs on these nodes that all of them are left; None when one of them may not be disturbed."""
    leaving = Counter(lease.id for old in olds for lease, _ in old.members)
    found, words = DisruptionCost(), []
    for lease_id, count in leaving.items():
        lease = roster.leases[lease_id]
        job = roster.jobs.get(lease.job_id)
        if job is None or job.stop_requested or not _is_stable(lease):
            return None
        price, usable = roster.price_of(lease), len(lease.usable)
        stays = usable - count >= lease.shape.at_least
        if stays:
            cost = price * (REFORM_S + NOTICE_S * count / usable) / 3600.0
            words.append(f"{job.id} goes on with {usable - count} of {usable} members meanwhile")
        elif job.spec.is_preemptible:
            cost = price * (NOTICE_S + STOP_S) / 3600.0
            words.append(f"{job.id} stops for about {NOTICE_S + STOP_S:.0f} s")
        else:
            return None
        left_s = job.remaining_s(now_s)
        found = DisruptionCost(
            in_place=found.in_place and stays,
            cost_micro_usd=found.cost_micro_usd + cost,
            lost_h=max(found.lost_h, (REFORM_S if stays else RESTART_S) / 3600.0),
            staying_micro_usd_h=found.staying_micro_usd_h + price * (1.0 - count / lease.member_count),
            stable_s=min(found.stable_s, _stable_s(roster, lease, now_s), float("inf") if left_s is None else left_s),
            description=", ".join(words),
        )
    return found


def _is_stable(lease: Lease) -> bool:
    return lease.state is LeaseState.ACTIVE and all(member.state in _STABLE for member in lease.members)


def _stable_s(roster: NodeOccupancy, lease: Lease, now_s: float) -> float:
    """Since it was admitted, or since the last of its nodes was ready."""
    views = (roster.views.get(member.node_id) for member in lease.members if member.has_node)
    ready_at_s = (view.node.ready_at_s for view in views if view is not None)
    return now_s - max([lease.created_at_s, *(at_s for at_s in ready_at_s if at_s is not None)])
