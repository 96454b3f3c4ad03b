"""The markets that a deadline job may use now, applied to its shapes."""

from __future__ import annotations

from collections.abc import Sequence

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import MARKET_LABEL, CapacityType, labels_match
from raytide.core.objects.snapshot import MarketConstraint


def constrain(shapes: Sequence[Shape], constraint: MarketConstraint | None) -> tuple[Shape, ...]:
    """Returns the shapes restricted to the allowed markets, the wanted market first; none while the job waits.

    Returns them unchanged without a constraint, for a late job, and if the shapes name none of the allowed markets.
    """
    if constraint is None or constraint.markets is None:
        return tuple(shapes)
    allowed = tuple(
        _in_market(shape, market) for market in constraint.markets for shape in shapes if _allows(shape, market)
    )
    return allowed or (tuple(shapes) if constraint.markets else ())


def is_allowed(shape: Shape, constraint: MarketConstraint) -> bool:
    """Returns True if the constraint has a wanted market and the shape's labels allow it."""
    return constraint.wanted is not None and _allows(shape, constraint.wanted)


def without_market_constraint(shape: Shape, shapes: Sequence[Shape]) -> Shape:
    """Returns the original of a shape that `constrain` restricted, because a lease may change its market. The result
    names no market if the original shapes allow every market.
    """
    free = _without_market(shape)
    originals = [each for each in shapes if _without_market(each) == free]
    return free if all(any(_allows(each, market) for each in originals) for market in CapacityType) else originals[0]


def alternatives(shape: Shape, shapes: Sequence[Shape], market: CapacityType) -> tuple[Shape, ...]:
    """Returns the job's shapes restricted to the market; none if the lease's own shape allows the market already."""
    return () if _allows(shape, market) else tuple(_in_market(each, market) for each in shapes if _allows(each, market))


def _allows(shape: Shape, market: CapacityType) -> bool:
    label = shape.labels.get(MARKET_LABEL)
    return label is None or labels_match({MARKET_LABEL: label}, {MARKET_LABEL: str(market)})


def _in_market(shape: Shape, market: CapacityType) -> Shape:
    return shape.model_copy(update={"labels": {**shape.labels, MARKET_LABEL: str(market)}})


def _without_market(shape: Shape) -> Shape:
    labels = {key: value for key, value in shape.labels.items() if key != MARKET_LABEL}
    return shape.model_copy(update={"labels": labels})
