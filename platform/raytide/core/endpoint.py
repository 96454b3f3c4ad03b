"""An endpoint: a model served over HTTP by replicas whose number follows the load."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field, field_validator, model_validator

from raytide.core.config import Config

_NUMBERED = re.compile(r"(job|lease|node)-[0-9]+")
_RESERVED = frozenset({"cluster", "unmanaged", "minimum"})


class Replicas(Config):
    min: int = Field(default=1, ge=1)
    max: int = Field(default=1, ge=1)
    target_ongoing: float = Field(default=8.0, gt=0)
    """Requests in flight or waiting that one replica is meant to carry."""
    upscale_delay_s: float = Field(default=0.0, ge=0)
    downscale_delay_s: float = Field(default=30.0, ge=0)
    """How long the load must have been below before a replica goes."""

    @model_validator(mode="after")
    def _order(self) -> Replicas:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class ServeSpec(Config):
    """`raytide serve`: which model, on what, and how many of it."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Also the OpenAI model name."""
    model: str
    """A Hugging Face directory that every node can read."""
    team: str = "default"
    replicas: Replicas = Replicas()
    resources: dict[str, float] = Field(default_factory=lambda: {"CPU": 1.0})
    """Of one replica."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Label selector for its nodes."""
    engine: dict[str, object] = Field(default_factory=dict)
    """Options of the engine, as `raytide.LLM` takes them."""
    max_ongoing: int = Field(default=256, ge=1)
    """More at once in one replica wait in the router."""

    @field_validator("name")
    @classmethod
    def _not_a_name_of_ours(cls, name: str) -> str:
        """What waits, what costs and what happened is told by name: an endpoint's must be nobody else's."""
        if name in _RESERVED or _NUMBERED.fullmatch(name):
            raise ValueError(f"{name} is a name that raytide gives itself; choose another")
        return name


class EndpointState(StrEnum):
    DEPLOYING = "deploying"
    RUNNING = "running"  # at least one replica answers
    FAILED = "failed"
    DELETING = "deleting"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Endpoint:
    spec: ServeSpec
    user: str
    state: EndpointState
    created_at_s: float
    target_replicas: int
    """What the controller last published."""
    low_since_s: float | None = None
    """Since when the load has asked for fewer than `target_replicas`."""
    high_since_s: float | None = None
    ended_at_s: float | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """What its replicas and its router said, and when they said it."""

    at_s: float
    ongoing: float
    """Requests being answered plus requests waiting anywhere."""
    ready: int
    """Replicas that answer."""
    replica_nodes: tuple[str, ...] = ()
    """The Ray node of each replica that has one, starting ones included."""
