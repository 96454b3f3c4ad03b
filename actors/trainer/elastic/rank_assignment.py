"""Assigns the ranks of the next generation to workers. Workers without a rank are warm spares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

from raytide.core.errors import ConfigError
from raytide.core.objects.gang import Shape
from raytide.core.specs.train import TrainSpec

Key = tuple[int, int, int, str]
"""Member index, its incarnation, the rank's slot in the member, and the member's placement group."""


class RankCandidate(Protocol):
    @property
    def key(self) -> Key: ...


S = TypeVar("S", bound=RankCandidate)


def slots_of(shape: Shape) -> int:
    """Returns the number of ranks of one member: one per GPU, or one if the member has no GPU."""
    return max(1, int(shape.resources.get("GPU", 0)))


def most_ranks(spec: TrainSpec, shape: Shape) -> int:
    """Returns the number of ranks of a full gang. `spec.spares` is the number of spare members. Spare members have no
    ranks.
    """
    return (shape.members - spec.spares) * slots_of(shape)


def usable(spec: TrainSpec, ranks: int) -> int:
    """Returns how many ranks the layout can use if `ranks` ranks are available. Returns 0 if there are too few ranks
    for the layout.
    """
    try:
        return spec.layout.sizes(ranks).world if ranks else 0
    except ConfigError:
        return 0


def assign_ranks(
    candidates: Iterable[S], shape: Shape, *, most: int, usable: Callable[[int], int], current: Collection[S] = ()
) -> list[S]:
    """Returns the candidates that get a rank, in rank order. Returns an empty list if fewer members are ready than the
    gang's minimum, or if the layout cannot use so few ranks.

    Candidates that have a rank now are preferred, because their memory holds training state. The ranks of one member
    are adjacent.
    """
    complete = _complete_members(candidates, slots_of(shape))
    if len({candidate.key[0] for candidate in complete}) < shape.at_least:
        return []
    selected = sorted(complete, key=lambda candidate: (candidate not in current, candidate.key))[:most]
    return sorted(selected[: usable(len(selected))], key=lambda candidate: candidate.key)


def _complete_members(candidates: Iterable[S], slots: int) -> list[S]:
    """Returns the candidates of members whose ranks are all ready; an incomplete member gets no rank."""
    by_member: dict[int, list[S]] = {}
    for candidate in candidates:
        by_member.setdefault(candidate.key[0], []).append(candidate)
    return [candidate for ranks in by_member.values() if len(ranks) == slots for candidate in ranks]
