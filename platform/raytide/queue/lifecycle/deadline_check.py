"""The check, at submission, that a deadline can be met at all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from raytide.core.clock import moment
from raytide.core.errors import CapacityError, UsageError
from raytide.core.objects.gang import Shape
from raytide.core.objects.job import JobSpec
from raytide.core.objects.node import CapacityType, NodeType
from raytide.scheduling.diagnosis import copies_that_fit, open_zones


def resolve_deadline(spec: JobSpec, node_types: Sequence[NodeType], now_s: float) -> JobSpec:
    """Returns the spec with its deadline as a point in time.

    Raises UsageError if there is not enough time, CapacityError if only spot nodes could hold its gang.
    """
    if spec.deadline is None:
        return spec
    deadline = spec.deadline
    if isinstance(deadline, timedelta):
        deadline = datetime.fromtimestamp(now_s, tz=UTC) + deadline
    left_s = deadline.timestamp() - now_s
    if left_s <= 0:
        raise UsageError(
            f"the deadline of {spec.name}, {moment(deadline.timestamp())}, is past.", hint="Name a later one."
        )
    if spec.estimate_h is not None and spec.estimate_h * 3600.0 > left_s:
        raise UsageError(
            f"{spec.name} cannot be done by {moment(deadline.timestamp())}: it needs {spec.estimate_h:g} h by its own "
            f"estimate, even on demand, and there are {left_s / 3600:.1f} h.",
            hint="Name a later deadline, or a larger gang with a smaller estimate_h.",
        )
    if not any(_holds(shape, node_type) for shape in spec.gang.shapes for node_type in node_types):
        raise CapacityError(
            f"no deadline can be promised for {spec.name}: only spot nodes could hold its gang.",
            hint="Add an on-demand node type that holds it, allow it in the shape's labels, or leave the deadline out.",
        )
    return spec.model_copy(update={"deadline": deadline})


def _holds(shape: Shape, node_type: NodeType) -> bool:
    """Returns True if the type is on-demand and can hold a member."""
    is_open = node_type.market is CapacityType.ON_DEMAND and node_type.max_nodes > 0 and open_zones(shape, node_type)
    return bool(is_open and copies_that_fit(shape.resources, node_type.resources))
