"""What else could have been bought: the cheaper offers that were not to be had, and the next dearer ones."""

from __future__ import annotations

from raytide.core.gang import Shape
from raytide.core.market import Market
from raytide.core.money import format_usd
from raytide.core.plan import Rejected
from raytide.core.shelf import Offer

CHEAPER, DEARER = 2, 2
"""How many of each are told."""


def rejected(
    market: Market, shape: Shape, members: int, taken: Offer, *, is_spread: bool = False
) -> tuple[Rejected, ...]:
    """Beside `taken`, for a node that holds so many members of the shape; replicas are spread over zones."""
    per_member = taken.cost_micro_usd_h / members
    cheaper: list[tuple[float, Rejected]] = []
    dearer: list[tuple[float, Rejected]] = []
    for offer, fit in market.holding(shape):
        cost = offer.cost_micro_usd_h / min(fit, members)
        refusal = market.refusal(offer)
        if offer.name == taken.name:
            continue
        if cost <= per_member and refusal is not None:
            cheaper.append((cost, Rejected(offer.name, refusal[1])))
        elif cost <= per_member and is_spread:
            extra = round((cost - per_member) * members)
            cheaper.append(
                (cost, Rejected(offer.name, "costs no more, but too many would be lost there at once", extra))
            )
        elif cost > per_member and refusal is None:
            extra = round((cost - per_member) * members)
            dearer.append((cost, Rejected(offer.name, _dearer(offer, extra), extra)))
    best = [sorted(found, key=lambda item: (item[0], item[1].choice)) for found in (cheaper, dearer)]
    return tuple(item for _, item in (*best[0][:CHEAPER], *best[1][:DEARER]))


def _dearer(offer: Offer, extra_micro_usd_h: int) -> str:
    risk = f", {offer.deaths_per_h:g} losses an hour included" if offer.deaths_per_h else ""
    return f"costs {format_usd(extra_micro_usd_h)}/h more for the same members{risk}"
