"""What a job may ask for now by its budgets, its own and its team's: looked up until more is committed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytide.core.objects.job import Job
from raytide.core.objects.node import MARKET_LABEL, CapacityType
from raytide.jobs.admission.shape_request import ShapeRequest, ShapeRequests
from raytide.jobs.budget import Budgets
from raytide.scheduling.diagnosis import Unschedulable


@dataclass(slots=True, eq=False)
class AffordableShapes:
    asks: tuple[ShapeRequest, ...]
    """Beyond a soft limit, its own or its team's, on spot nodes only. None while it has the time to wait for spot."""
    unpaid: tuple[Unschedulable | None, ...]
    """Why its budgets do not allow each of them, at the least that the gang may cost; None for those they allow."""
    paid: Sequence[ShapeRequest]
    """Those that they allow; for the others it helps nothing when anybody gives way."""
    soft: str
    """Who is beyond a soft limit; "" when nobody is."""
    version: int
    """Of the purse."""

    @classmethod
    def of(cls, job: Job, asks: ShapeRequests, purse: Budgets) -> AffordableShapes:
        soft = purse.beyond_soft(job)
        may_have = asks.on_spot(job) if soft else asks.of(job)
        unpaid = tuple([_unpaid(job, ask, purse, soft) for ask in may_have])
        paid = [ask for ask, short in zip(may_have, unpaid, strict=True) if short is None]
        return cls(may_have, unpaid, paid, soft, purse.version)

    @property
    def may_start(self) -> bool:
        """Whether it starts once there is room: now, on a fleet that can hold it, and paid for."""
        return any(ask.never is None for ask in self.paid)


def _unpaid(job: Job, ask: ShapeRequest, purse: Budgets, soft: str) -> Unschedulable | None:
    """What a gang does cost shows once it is placed."""
    if (short := purse.refuses(job, ask.micro_usd_h * ask.at_least)) is not None:
        return short
    if soft and ask.shape.labels.get(MARKET_LABEL) != CapacityType.SPOT:
        reason = f"{soft} is beyond its soft budget and may use spot nodes only; {job.id} asks for others"
        return Unschedulable("budget", f"{reason}.", "Drop the market label, or raise the budget.")
    return None
