"""Who takes a seat in the next generation, and who stays a warm spare. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

from raytide.core.errors import ConfigError
from raytide.core.objects.gang import Shape
from raytide.core.specs.train import TrainSpec

Key = tuple[int, int, int, str]
"""Member index, its incarnation, the rank's slot inside the member, and the member's placement group."""


class RankCandidate(Protocol):
    @property
    def key(self) -> Key: ...


S = TypeVar("S", bound=RankCandidate)


def slots_of(shape: Shape) -> int:
    """Ranks in a member: one for each GPU, or one."""
    return max(1, int(shape.resources.get("GPU", 0)))


def most_ranks(spec: TrainSpec, shape: Shape) -> int:
    """Ranks of a whole gang; what the lease has beyond them is spare."""
    return (shape.members - spec.spares) * slots_of(shape)


def usable(spec: TrainSpec, ranks: int) -> int:
    """How many of `ranks` the layout can use; 0 when they are too few for any use."""
    try:
        return spec.layout.sizes(ranks).world if ranks else 0
    except ConfigError:
        return 0


def assign_ranks(
    able: Iterable[S], shape: Shape, *, most: int, usable: Callable[[int], int], held: Collection[S] = ()
) -> list[S]:
    """Those of `able` that train, in rank order; nobody when fewer than the gang's minimum are there.

    Whoever held a seat keeps one, since its memory holds state; ranks of a member stay neighbours.
    """
    whole = _whole(able, slots_of(shape))
    if len({one.key[0] for one in whole}) < shape.at_least:
        return []
    first = sorted(whole, key=lambda one: (one not in held, one.key))[:most]
    return sorted(first[: usable(len(first))], key=lambda one: one.key)


def _whole(able: Iterable[S], slots: int) -> list[S]:
    """A member whose ranks are not all there takes no seat: its neighbours would wait for links that it lacks."""
    by_member: dict[int, list[S]] = {}
    for one in able:
        by_member.setdefault(one.key[0], []).append(one)
    return [one for ranks in by_member.values() if len(ranks) == slots for one in ranks]
