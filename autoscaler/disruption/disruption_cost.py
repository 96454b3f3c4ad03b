"""The cost of moving members of gangs. An elastic gang continues with fewer members. Any other gang stops for a
checkpoint and a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from raytide.autoscaler.nodes.occupancy import NodeOccupancy, Tenants
from raytide.core.objects.gang import Lease, LeaseState, MemberState
from raytide.scheduling.offerings import RESTART_S

NOTICE_S = 60.0
"""The time that members keep working before they leave, for a checkpoint or for the rest to continue without them."""
STOP_S = 120.0
"""The downtime of a gang that stopped: nodes, processes, reading its checkpoint."""
REFORM_S = 30.0
"""The total downtime of an elastic gang that re-forms twice, smaller and then whole again."""

_STABLE = (MemberState.READY, MemberState.WAITING, MemberState.PARKED)


@dataclass(frozen=True, slots=True)
class DisruptionCost:
    """The cost of a disruption in which a set of gangs must leave some of their nodes."""

    in_place: bool = True
    """True if no gang stops, because each keeps its minimum."""
    cost_micro_usd: float = 0.0
    """The price of machines during the downtime."""
    lost_h: float = 0.0
    """The time that the gangs lose if one of the new nodes is lost."""
    staying_micro_usd_h: float = 0.0
    """The price of the nodes that the gangs keep."""
    stable_s: float = float("inf")
    """The shortest of the gangs' times since their last change and of their remaining run times."""
    description: str = ""


def disruption_cost(occupancy: NodeOccupancy, olds: Sequence[Tenants], now_s: float) -> DisruptionCost | None:
    """Returns the cost of taking the nodes `olds` from all gangs that have members on these nodes. Returns None if one
    of these gangs may not be disrupted.
    """
    leaving = Counter(lease.id for old in olds for lease, _ in old.members)
    found, notes = DisruptionCost(), []
    for lease_id, count in leaving.items():
        lease = occupancy.leases[lease_id]
        job = occupancy.jobs.get(lease.job_id)
        if job is None or job.stop_requested or not _is_stable(lease):
            return None
        price, usable = occupancy.price_of(lease), len(lease.usable)
        stays = usable - count >= lease.shape.at_least
        if stays:
            cost = price * (REFORM_S + NOTICE_S * count / usable) / 3600.0
            notes.append(f"{job.id} continues with {usable - count} of {usable} members meanwhile")
        elif job.spec.is_preemptible:
            cost = price * (NOTICE_S + STOP_S) / 3600.0
            notes.append(f"{job.id} stops for about {NOTICE_S + STOP_S:.0f} s")
        else:
            return None
        left_s = job.remaining_s(now_s)
        found = DisruptionCost(
            in_place=found.in_place and stays,
            cost_micro_usd=found.cost_micro_usd + cost,
            lost_h=max(found.lost_h, (REFORM_S if stays else RESTART_S) / 3600.0),
            staying_micro_usd_h=found.staying_micro_usd_h + price * (1.0 - count / lease.member_count),
            stable_s=min(
                found.stable_s, _stable_s(occupancy, lease, now_s), float("inf") if left_s is None else left_s
            ),
            description=", ".join(notes),
        )
    return found


def _is_stable(lease: Lease) -> bool:
    return lease.state is LeaseState.ACTIVE and all(member.state in _STABLE for member in lease.members)


def _stable_s(occupancy: NodeOccupancy, lease: Lease, now_s: float) -> float:
    """Returns the seconds since the gang was admitted, or since the last of its nodes became ready."""
    views = (occupancy.views.get(member.node_id) for member in lease.members if member.has_node)
    ready_at_s = (view.node.ready_at_s for view in views if view is not None)
    return now_s - max([lease.created_at_s, *(at_s for at_s in ready_at_s if at_s is not None)])
