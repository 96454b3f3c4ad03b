"""The alternatives to the offering that was chosen for a launch: cheaper offerings that were unavailable, cheaper
offerings that were too risky for replicas, and the next more expensive offerings.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice

from raytide.core.money import format_usd
from raytide.core.objects.gang import Shape
from raytide.core.objects.plan import Rejected
from raytide.scheduling.offerings import Offering, Offerings, OfferingTable

CHEAPER, DEARER = 2, 2
"""The most cheaper and the most dearer alternatives that are reported."""


def rejected(
    offerings: Offerings, shape: Shape, members: int, taken: Offering, *, is_spread: bool = False
) -> tuple[Rejected, ...]:
    """Returns the alternatives to the chosen offering `taken`, for a node that holds `members` members of `shape`.

    `is_spread` says that the members are replicas, which are spread over zones.
    """
    data = offerings.table.data_cost((shape,))
    per_member = taken.cost_micro_usd_h / members + data[taken.row]
    costs = [
        (o.cost_micro_usd_h / min(fit, members) + data[o.row], o)
        for o, fit in offerings.offerings_for(shape)
        if o.name != taken.name
    ]
    costs.sort(key=lambda item: (item[0], item[1].name))
    alternatives = [(offering, round((cost - per_member) * members)) for cost, offering in costs]
    first_dearer = bisect_right(costs, per_member, key=lambda item: item[0])
    cheaper = (_cheaper(offerings, offering, extra, is_spread) for offering, extra in alternatives[:first_dearer])
    dearer = (_dearer(offerings, offering, extra, shape) for offering, extra in alternatives[first_dearer:])
    return (*islice(filter(None, cheaper), CHEAPER), *islice(filter(None, dearer), DEARER))


def _cheaper(offerings: Offerings, offering: Offering, extra_micro_usd_h: int, is_spread: bool) -> Rejected | None:
    if (refusal := offerings.refusal(offering)) is not None:
        return Rejected(offering.name, refusal[1])
    reason = "costs no more, but too many replicas would be lost there at once"
    return Rejected(offering.name, reason, extra_micro_usd_h) if is_spread else None


def _dearer(offerings: Offerings, offering: Offering, extra_micro_usd_h: int, shape: Shape) -> Rejected | None:
    if offerings.refusal(offering) is not None:
        return None
    risk = f", {offering.reclaims_per_h:g} losses an hour included" if offering.reclaims_per_h else ""
    reason = f"costs {format_usd(extra_micro_usd_h)}/h more for the same members{risk}"
    if words := data_words(offerings, offering, shape):
        reason += f", and {words}"
    return Rejected(offering.name, reason, extra_micro_usd_h)


def data_words(offerings: Offerings, offering: Offering, shape: Shape) -> str:
    """Returns a text about the cost of moving a member's data to the offering's zone. The text is empty if the move is
    free.
    """
    cost, paid = data_transfer(offerings.table, offering, shape)
    return f"{cost}/h a member of them for data: {paid}" if paid else ""


def data_transfer(table: OfferingTable, offering: Offering, shape: Shape) -> tuple[str, str]:
    """Returns (hourly cost per member, description) of the data transfers that this offering needs. Two empty strings
    mean that the transfers are free.
    """
    transfer = table.transfer
    paid = transfer.describe(shape.inputs, offering.node_type, offering.zone) if transfer is not None else ""
    return (format_usd(round(float(table.data_cost((shape,))[offering.row]))), paid) if paid else ("", "")
