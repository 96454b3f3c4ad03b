"""Restricts the shapes of a deadline job to the markets (spot, on demand) that the job may use now."""

from __future__ import annotations

from collections.abc import Sequence

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import MARKET_LABEL, CapacityType, labels_match
from raytide.core.objects.snapshot import MarketConstraint


def constrain(shapes: Sequence[Shape], constraint: MarketConstraint | None) -> tuple[Shape, ...]:
    """Returns the shapes restricted to the allowed markets, the wanted market first. The result is empty while the job
    must wait.

    The shapes are returned unchanged in three cases: there is no constraint, the job is late, or no shape may use an
    allowed market.
    """
    if constraint is None or constraint.markets is None:
        return tuple(shapes)
    allowed = tuple(
        _in_market(shape, market) for market in constraint.markets for shape in shapes if _allows(shape, market)
    )
    return allowed or (tuple(shapes) if constraint.markets else ())


def is_allowed(shape: Shape, constraint: MarketConstraint) -> bool:
    """Returns True if the shape's labels allow the market that the constraint wants. Returns False if the constraint
    wants no market.
    """
    return constraint.wanted is not None and _allows(shape, constraint.wanted)


def without_market_constraint(shape: Shape, shapes: Sequence[Shape]) -> Shape:
    """Undoes `constrain` for a lease's shape. Returns the shape as it was before `constrain` restricted it to a market.
    `shapes` are the shapes in the job's spec.

    If the job's shapes allow every market, the result is not restricted to a market either, because a lease may
    change its market.
    """
    free = _without_market(shape)
    originals = [each for each in shapes if _restricts(free, _without_market(each))]
    if all(any(_allows(each, market) for each in originals) for market in CapacityType):
        return free
    return free.model_copy(update={"labels": {**originals[0].labels, **free.labels}})


def alternatives(shape: Shape, shapes: Sequence[Shape], market: CapacityType) -> tuple[Shape, ...]:
    """Returns the job's `shapes` that allow `market`. Each returned shape is restricted to `market`.

    `shape` is the shape of the job's lease. If it already allows `market`, the result is empty.
    """
    return () if _allows(shape, market) else tuple(_in_market(each, market) for each in shapes if _allows(each, market))


def _allows(shape: Shape, market: CapacityType) -> bool:
    label = shape.labels.get(MARKET_LABEL)
    return label is None or labels_match({MARKET_LABEL: label}, {MARKET_LABEL: str(market)})


def _in_market(shape: Shape, market: CapacityType) -> Shape:
    return shape.model_copy(update={"labels": {**shape.labels, MARKET_LABEL: str(market)}})


def _restricts(shape: Shape, original: Shape) -> bool:
    """Returns whether `shape` is `original`, perhaps with further labels. The queue adds an accelerator's label if the
    quota of another accelerator is too small.
    """
    labels = {**shape.labels, **original.labels}
    return labels == shape.labels and original.model_copy(update={"labels": labels}) == shape


def _without_market(shape: Shape) -> Shape:
    labels = {key: value for key, value in shape.labels.items() if key != MARKET_LABEL}
    return shape.model_copy(update={"labels": labels})
