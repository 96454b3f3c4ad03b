"""What else could have been bought: the cheaper offers that were not to be had, and the next dearer ones."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice

from raytide.core.money import format_usd
from raytide.core.objects.gang import Shape
from raytide.core.objects.plan import Rejected
from raytide.scheduling.offerings import Offering, Offerings

CHEAPER, DEARER = 2, 2
"""How many of each are told."""


def rejected(
    market: Offerings, shape: Shape, members: int, taken: Offering, *, is_spread: bool = False
) -> tuple[Rejected, ...]:
    """Beside `taken`, for a node that holds so many members of the shape; replicas are spread over zones."""
    per_member = taken.cost_micro_usd_h / members
    costs = [
        (o.cost_micro_usd_h / min(fit, members), o) for o, fit in market.offerings_for(shape) if o.name != taken.name
    ]
    costs.sort(key=lambda item: (item[0], item[1].name))
    others = [(offer, round((cost - per_member) * members)) for cost, offer in costs]
    first_dearer = bisect_right(costs, per_member, key=lambda item: item[0])
    cheaper = (_cheaper(market, offer, extra, is_spread) for offer, extra in others[:first_dearer])
    dearer = (_dearer(market, offer, extra) for offer, extra in others[first_dearer:])
    return (*islice(filter(None, cheaper), CHEAPER), *islice(filter(None, dearer), DEARER))


def _cheaper(market: Offerings, offer: Offering, extra_micro_usd_h: int, is_spread: bool) -> Rejected | None:
    if (refusal := market.refusal(offer)) is not None:
        return Rejected(offer.name, refusal[1])
    why = "costs no more, but too many would be lost there at once"
    return Rejected(offer.name, why, extra_micro_usd_h) if is_spread else None


def _dearer(market: Offerings, offer: Offering, extra_micro_usd_h: int) -> Rejected | None:
    if market.refusal(offer) is not None:
        return None
    risk = f", {offer.reclaims_per_h:g} losses an hour included" if offer.reclaims_per_h else ""
    why = f"costs {format_usd(extra_micro_usd_h)}/h more for the same members{risk}"
    return Rejected(offer.name, why, extra_micro_usd_h)
