"""Interventions: requests to the controller to do something once. An operator makes them, or an alert does so for the
operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from raytide.core.config import Config

OrderKind = Literal["restart_replica", "replace_node", "quarantine_node", "release_node", "resume"]
"""The kinds of interventions. `resume` ends the hold of a controller; see `HOLD`."""
HOLD: Final = "hold"
"""The kind of an order that a restore puts into the restored state. Until it ends, the controller does nothing."""


class OrderSpec(Config):
    """The request for an intervention. A second request with the same id changes nothing."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{8,100}$")]
    kind: OrderKind
    subject: Annotated[str, Field(min_length=1, max_length=200)]
    """The id of a node, or the name of an endpoint or, for `resume`, of the cluster."""
    replica: str = Field(default="", max_length=200)
    """For `restart_replica`: the id of the replica in Ray Serve."""
    reason: str = Field(default="", max_length=1000)

    @model_validator(mode="after")
    def _replica(self) -> OrderSpec:
        if bool(self.replica) != (self.kind == "restart_replica"):
            raise ValueError("`replica` belongs to `restart_replica`, and only to that")
        return self


@dataclass(frozen=True, slots=True)
class Order:
    """A stored intervention."""

    id: str
    kind: OrderKind | Literal["hold"]
    subject: str
    replica: str
    reason: str
    user: str
    at_s: float
    done_at_s: float | None = None
    outcome: str = ""
    """The result as text; empty until the intervention is done."""
