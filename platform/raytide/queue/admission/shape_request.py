"""The shapes that a job may request now, with the resources that each shape needs. Equal shapes share one
computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raytide.core.objects.gang import Shape
from raytide.core.objects.job import Job
from raytide.core.objects.node import MARKET_LABEL, CapacityType, NodeType, Resources, dominant_share
from raytide.core.objects.snapshot import MarketConstraint, Throughputs
from raytide.queue.admission import usage
from raytide.queue.budget import Budgets
from raytide.scheduling.diagnosis import Unschedulable, copies_that_fit, open_zones, why_impossible
from raytide.scheduling.market_constraint import constrain
from raytide.scheduling.offerings import Offerings
from raytide.scheduling.throughput import cost_per_work

Key = tuple[object, ...]

_SPOT = {MARKET_LABEL: str(CapacityType.SPOT)}


@dataclass(frozen=True, slots=True, eq=False)
class ShapeRequest:
    """A shape, with figures that stay constant within one decision."""

    shape: Shape
    key: int
    """A number that is equal for shapes that fit under the same conditions."""
    member_key: int
    """A number that is equal for shapes whose members have the same resources and labels."""
    at_least: int
    one: Resources
    """The quota that one member uses, on any node type."""
    least: Resources
    """The quota that the minimum number of members (`at_least`) uses."""
    node_types: frozenset[str]
    """The node types that can hold a member."""
    micro_usd_h: float
    """The lowest price of a member."""
    never: Unschedulable | None
    """The reason why even an empty fleet could not hold the shape; None if it could."""


@dataclass(slots=True, eq=False)
class ShapeRequests:
    node_types: Sequence[NodeType]
    stances: Mapping[str, MarketConstraint]
    offerings: Offerings
    throughputs: Mapping[str, Throughputs]
    _known: dict[Key, ShapeRequest] = field(default_factory=dict)
    _numbers: dict[Key, int] = field(default_factory=dict)
    _by_job: dict[str, tuple[ShapeRequest, ...]] = field(default_factory=dict)
    _spot_by_job: dict[str, tuple[ShapeRequest, ...]] = field(default_factory=dict)

    def first(self, job: Job) -> ShapeRequest:
        """Returns the request for the first shape in the job's spec, on any market."""
        is_free = job.id not in self.stances and job.id not in self.throughputs
        return self.for_job(job)[0] if is_free else self.request(job.spec.gang.shapes[0])

    def for_job(self, job: Job) -> tuple[ShapeRequest, ...]:
        """Returns the shapes that the job may request now. If throughputs of the job are known, the cheapest per unit
        of work comes first; otherwise the shapes are in the order of the spec. The result is empty if the job waits for
        spot nodes.
        """
        if (found := self._by_job.get(job.id)) is None:
            shapes = _cheapest_first(job.spec.gang.shapes, self.offerings, self.throughputs.get(job.id, {}))
            allowed = constrain(shapes, self.stances.get(job.id))
            found = self._by_job[job.id] = tuple(self.request(shape) for shape in allowed)
        return found

    def on_spot(self, job: Job) -> tuple[ShapeRequest, ...]:
        """Returns the shapes of `for_job`, restricted to spot nodes. A shape that already names a market stays as it
        is.
        """
        if (found := self._spot_by_job.get(job.id)) is None:
            shapes = [each.shape for each in self.for_job(job)]
            spot = [shape.model_copy(update={"labels": {**_SPOT, **shape.labels}}) for shape in shapes]
            found = self._spot_by_job[job.id] = tuple(self.request(shape) for shape in spot)
        return found

    def request(self, shape: Shape) -> ShapeRequest:
        own = (shape.members, shape.min_members, shape.together, shape.inputs)
        same = (*own, *shape.resources.items(), *shape.labels.items())
        if (found := self._known.get(same)) is None:
            found = self._known[same] = self._look_up(shape)
        return found

    def _look_up(self, shape: Shape) -> ShapeRequest:
        types = [t for t in self.node_types if copies_that_fit(shape.resources, t.resources) and open_zones(shape, t)]
        member = (*sorted(shape.resources.items()), *sorted(shape.labels.items()))
        return ShapeRequest(
            shape=shape,
            key=self._number((shape.at_least, shape.together, *member)),
            member_key=self._number(member),
            at_least=shape.at_least,
            one=usage.quota_usage(shape, [None]),
            least=usage.least_quota(shape),
            node_types=frozenset(node_type.name for node_type in types),
            micro_usd_h=min((usage.price_per_hour(shape, [t]) for t in types), default=0.0),
            never=why_impossible(shape, shape.at_least, self.node_types, "it"),
        )

    def _number(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


@dataclass(slots=True, eq=False)
class AffordableShapes:
    """The shapes of a job that the budgets of the job and its team allow. This object is valid until `Budgets.version`
    changes.
    """

    requests: tuple[ShapeRequest, ...]
    """The requests, for spot nodes only beyond a soft limit; empty while the job waits for spot."""
    unaffordable: tuple[Unschedulable | None, ...]
    """The reason why the budgets refuse each request even at its lowest price; None if they allow it."""
    affordable: Sequence[ShapeRequest]
    """The requests that the budgets allow."""
    over_soft_limit: str
    """The job or team that is beyond a soft limit; "" if there is none."""
    version: int

    @classmethod
    def of(cls, job: Job, requests: ShapeRequests, budgets: Budgets) -> AffordableShapes:
        over = budgets.over_soft_limit(job)
        allowed = requests.on_spot(job) if over else requests.for_job(job)
        refused = tuple([_unaffordable(job, each, budgets, over) for each in allowed])
        affordable = [each for each, why in zip(allowed, refused, strict=True) if why is None]
        return cls(allowed, refused, affordable, over, budgets.version)

    @property
    def can_start(self) -> bool:
        """True if the fleet could ever hold one of the affordable shapes. The job then starts as soon as nodes are
        free.
        """
        return any(request.never is None for request in self.affordable)


def _unaffordable(job: Job, request: ShapeRequest, budgets: Budgets, over_soft_limit: str) -> Unschedulable | None:
    if (refused := budgets.refusal(job, request.micro_usd_h * request.at_least)) is not None:
        return refused
    if over_soft_limit and request.shape.labels.get(MARKET_LABEL) != CapacityType.SPOT:
        reason = f"{over_soft_limit} is beyond its soft budget and may use spot nodes only; {job.id} asks for others"
        return Unschedulable("budget", f"{reason}.", "Drop the market label, or raise the budget.")
    return None


def _cheapest_first(shapes: Sequence[Shape], offerings: Offerings, throughputs: Throughputs) -> Sequence[Shape]:
    """Returns the shapes by cost per unit of work. At equal cost or unknown throughput they are in the job's own
    order."""
    if len(shapes) < 2 or not throughputs:
        return shapes
    return sorted(shapes, key=lambda shape: _cost_per_work(shape, offerings, throughputs))


def _cost_per_work(shape: Shape, offerings: Offerings, throughputs: Throughputs) -> float:
    """Returns the cost in micro-dollars of the work that one GPU of the slowest node type does in an hour, including
    losses on spot.
    """
    costs = [
        cost_per_work(
            offering.cost_micro_usd_h * dominant_share(shape.resources, offering.node_type.resources),
            offering.node_type.name,
            throughputs,
        )
        for offering, _ in offerings.offerings_for(shape)
    ]
    return float(f"{min(costs, default=float('inf')) / shape.gpus:.4g}") if shape.gpus else 0.0
