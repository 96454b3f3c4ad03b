"""A deadline that cannot be met is refused when the job is submitted."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from tests.queue.cluster import H100, gpus, spec

from raytide.core.errors import CapacityError, UsageError
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import MARKET_LABEL, CapacityType
from raytide.queue.lifecycle.submission import resolve_deadline

NOW_S = datetime(2026, 11, 21, 20, tzinfo=UTC).timestamp()
SPOT = H100.model_copy(update={"name": "h100x8.spot", "market": CapacityType.SPOT})


def test_a_time_from_now_becomes_a_moment() -> None:
    asked = resolve_deadline(spec(gpus(8), deadline="8h", estimate_h=7.5), [H100, SPOT], NOW_S)
    assert asked.due_at_s == NOW_S + 8 * 3600
    assert resolve_deadline(asked, [H100], NOW_S + 60) == asked
    assert resolve_deadline(spec(gpus(8)), [SPOT], NOW_S).deadline is None
    assert resolve_deadline(spec(gpus(8, 3, 2), deadline="8h"), [H100, SPOT], NOW_S).due_at_s == NOW_S + 8 * 3600


def test_a_deadline_in_the_past_is_refused() -> None:
    with pytest.raises(UsageError, match="the deadline of j, Nov 21 19:00 UTC, is past"):
        resolve_deadline(spec(gpus(8), deadline="2026-11-21T19:00Z"), [H100], NOW_S)


def test_a_job_that_even_on_demand_could_not_end_in_time_is_refused() -> None:
    with pytest.raises(UsageError, match=r"it needs 9 h by its own estimate, even on demand, and there are 8\.0 h"):
        resolve_deadline(spec(gpus(8), deadline="8h", estimate_h=9), [H100], NOW_S)


@pytest.mark.parametrize(
    ("shape", "types"),
    [
        (gpus(8), [SPOT]),
        (gpus(8), [SPOT, H100.model_copy(update={"max_nodes": 0})]),
        (gpus(16), [SPOT, H100]),
        (gpus(8, members=3), [SPOT, H100]),
        (gpus(8).model_copy(update={"labels": {MARKET_LABEL: "spot"}}), [SPOT, H100]),
    ],
)
def test_without_an_on_demand_node_that_holds_it_no_deadline_is_promised(shape: Shape, types: list[object]) -> None:
    with pytest.raises(CapacityError, match="on-demand nodes alone could not hold its gang"):
        resolve_deadline(spec(shape, deadline="8h"), types, NOW_S)  # type: ignore[arg-type]
