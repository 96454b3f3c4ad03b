"""What a shape asks of a fleet, looked up once for all jobs that ask for the like. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raytide.core.objects.gang import Shape
from raytide.core.objects.job import Job
from raytide.core.objects.node import MARKET_LABEL, NodeType, Resources
from raytide.core.objects.node import CapacityType as Kind
from raytide.core.objects.snapshot import MarketConstraint, Throughputs
from raytide.jobs.admission import usage
from raytide.jobs.admission.shapes import cheapest_first
from raytide.scheduling.diagnosis import Unschedulable, copies_that_fit, open_zones, why_impossible
from raytide.scheduling.market_constraint import constrain
from raytide.scheduling.offerings import Offerings

Key = tuple[object, ...]

_SPOT = {MARKET_LABEL: str(Kind.SPOT)}


@dataclass(frozen=True, slots=True, eq=False)
class ShapeRequest:
    """A shape with all that does not change while a decision is made."""

    shape: Shape
    key: int
    """The same for those that fit or do not fit alike."""
    member: int
    """The same for those of which one member fits wherever one of the other does."""
    at_least: int
    one: Resources
    """What a member counts against quotas, wherever it sits."""
    least: Resources
    """What the least that a gang can do with counts."""
    on: frozenset[str]
    """The node types that would hold a member."""
    micro_usd_h: float
    """The least that a member costs."""
    never: Unschedulable | None
    """Why not even an empty fleet would hold it."""


@dataclass(slots=True, eq=False)
class ShapeRequests:
    node_types: Sequence[NodeType]
    stances: Mapping[str, MarketConstraint]
    market: Offerings
    paces: Mapping[str, Throughputs]
    _known: dict[Key, ShapeRequest] = field(default_factory=dict)
    _numbers: dict[Key, int] = field(default_factory=dict)
    _plain: dict[str, tuple[ShapeRequest, ...]] = field(default_factory=dict)
    _on_spot: dict[str, tuple[ShapeRequest, ...]] = field(default_factory=dict)

    def first(self, job: Job) -> ShapeRequest:
        """The shape that it names first, wherever it may sit now."""
        is_free = job.id not in self.stances and job.id not in self.paces
        return self.of(job)[0] if is_free else self.ask(job.spec.gang.shapes[0])

    def of(self, job: Job) -> tuple[ShapeRequest, ...]:
        """What it may have now, first the shape in which its work costs least; nothing while it has the time to wait
        for spot."""
        if (found := self._plain.get(job.id)) is None:
            wanted = cheapest_first(job.spec.gang.shapes, self.market, self.paces.get(job.id, {}))
            shapes = constrain(wanted, self.stances.get(job.id))
            found = self._plain[job.id] = tuple(self.ask(shape) for shape in shapes)
        return found

    def on_spot(self, job: Job) -> tuple[ShapeRequest, ...]:
        """The same, on spot nodes only where it names no market."""
        if (found := self._on_spot.get(job.id)) is None:
            found = self._on_spot[job.id] = tuple(self.ask(_on_spot(ask.shape)) for ask in self.of(job))
        return found

    def ask(self, shape: Shape) -> ShapeRequest:
        same = (shape.members, shape.min_members, shape.together, *shape.resources.items(), *shape.labels.items())
        if (found := self._known.get(same)) is None:
            found = self._known[same] = self._look_up(shape)
        return found

    def _look_up(self, shape: Shape) -> ShapeRequest:
        fitting = [t for t in self.node_types if copies_that_fit(shape.resources, t.resources) and open_zones(shape, t)]
        member = (*sorted(shape.resources.items()), *sorted(shape.labels.items()))
        return ShapeRequest(
            shape=shape,
            key=self._number((shape.at_least, shape.together, *member)),
            member=self._number(member),
            at_least=shape.at_least,
            one=usage.quota_usage(shape, [None]),
            least=usage.least_quota(shape),
            on=frozenset(node_type.name for node_type in fitting),
            micro_usd_h=min((usage.price_per_hour(shape, [t]) for t in fitting), default=0.0),
            never=why_impossible(shape, shape.at_least, self.node_types, "it"),
        )

    def _number(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _on_spot(shape: Shape) -> Shape:
    return shape.model_copy(update={"labels": {**_SPOT, **shape.labels}})
