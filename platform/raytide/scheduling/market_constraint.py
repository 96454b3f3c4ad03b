"""The markets that a deadline job may use now, applied to its shapes."""

from __future__ import annotations

from collections.abc import Sequence

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import MARKET_LABEL, CapacityType, labels_match
from raytide.core.objects.snapshot import MarketConstraint


def constrain(shapes: Sequence[Shape], stance: MarketConstraint | None) -> tuple[Shape, ...]:
    """The shapes restricted to the allowed markets, the wanted market first; none while the job waits.

    Unchanged without a constraint, for a late job, and if the shapes name none of the allowed markets.
    """
    if stance is None or stance.markets is None:
        return tuple(shapes)
    allowed = tuple(
        _in_market(shape, market) for market in stance.markets for shape in shapes if _allows(shape, market)
    )
    return allowed or (tuple(shapes) if stance.markets else ())


def is_allowed(shape: Shape, stance: MarketConstraint) -> bool:
    """True if there is a wanted market and the shape's labels allow it."""
    return stance.wanted is not None and _allows(shape, stance.wanted)


def without_market_constraint(shape: Shape, shapes: Sequence[Shape]) -> Shape:
    """The original of a shape that `constrain` restricted, because the market of a lease may change: to any market if
    the original shapes allow each of them."""
    free = _without_market(shape)
    asked = [one for one in shapes if _without_market(one) == free]
    return free if all(any(_allows(one, market) for one in asked) for market in CapacityType) else asked[0]


def alternatives(shape: Shape, shapes: Sequence[Shape], market: CapacityType) -> tuple[Shape, ...]:
    """The job's shapes that the market allows, if the lease's own shape is not one of them."""
    return () if _allows(shape, market) else tuple(_in_market(one, market) for one in shapes if _allows(one, market))


def _allows(shape: Shape, market: CapacityType) -> bool:
    said = shape.labels.get(MARKET_LABEL)
    return said is None or labels_match({MARKET_LABEL: said}, {MARKET_LABEL: str(market)})


def _in_market(shape: Shape, market: CapacityType) -> Shape:
    return shape.model_copy(update={"labels": {**shape.labels, MARKET_LABEL: str(market)}})


def _without_market(shape: Shape) -> Shape:
    labels = {key: value for key, value in shape.labels.items() if key != MARKET_LABEL}
    return shape.model_copy(update={"labels": labels})
