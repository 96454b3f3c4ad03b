"""A rollout: a new revision of an endpoint beside the one that serves it, as it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from raytide.core.config import Config

REVISION_SEPARATOR = "~"
"""Separates an endpoint's name from a revision's number in the name of an application; no endpoint's name has it."""
MOST_COUNT_BYTES = 1 << 20

RolloutKind = Literal["canary", "shadow", "ab"]


class RolloutState(StrEnum):
    STARTING = "starting"  # the challenger has no replica yet
    RUNNING = "running"
    PROMOTED = "promoted"  # the challenger serves the endpoint
    ROLLED_BACK = "rolled_back"  # it was worse
    STOPPED = "stopped"  # by a user

    @property
    def is_live(self) -> bool:
        return self in (RolloutState.STARTING, RolloutState.RUNNING)


@dataclass(frozen=True, slots=True)
class Rollout:
    """A challenger of an endpoint. Its revisions are Serve applications of their own."""

    number: int
    name: str
    """The endpoint's."""
    team: str
    user: str
    kind: RolloutKind
    plan: Mapping[str, Any]
    """The RolloutSpec as JSON."""
    champion: int
    """The revision that served the endpoint at the begin."""
    challenger: int
    champion_application: str
    challenger_application: str
    created_at_s: float
    why: str = ""
    asked: Literal["", "stop", "promote"] = ""
    """The end that a user has asked for."""
    asked_by: str = ""
    asked_why: str = ""
    state: RolloutState = RolloutState.STARTING
    percent: float = 0.0
    """The challenger's share of traffic."""
    reason: str = ""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """The state of the decision, as JSON."""
    decided_at_s: float | None = None
    """The time of its outcome."""
    ended_at_s: float | None = None
    """The time at which the application that lost was gone."""

    @property
    def loser(self) -> str:
        """The application that ends with the rollout."""
        return self.champion_application if self.state is RolloutState.PROMOTED else self.challenger_application


@dataclass(frozen=True, slots=True)
class Serving:
    """The application and revision that serve an endpoint."""

    name: str
    application: str
    """The name of the record in `endpoints`, and of the application in Ray Serve."""
    revision: int
    previous: int = 0
    """The revision that served before; 0 if there is none."""


_Count = Annotated[int, Field(ge=0, le=2**53)]


class CountedRevision(Config):
    """The counts of one revision by one gateway since the gateway started, so that a repeated report adds nothing.

    `RevisionCounts` in `raytide.rollout.canary` says what the counts mean.
    """

    rollout: int = Field(ge=1, le=2**53)
    revision: int = Field(ge=1, le=2**31)
    requests: _Count = 0
    errors: _Count = 0
    started: _Count = 0
    late: _Count = 0
    first_token_ms: _Count = 0
    """The sum over `started` requests with a first token."""
    judged: _Count = 0
    """Gateways leave it and `disliked` at 0: thumbs come through the API."""
    disliked: _Count = 0


class RolloutReport(Config):
    most_bytes: ClassVar[int] = MOST_COUNT_BYTES

    gateway: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    counted: tuple[CountedRevision, ...] = Field(default=(), max_length=1000)


def application_of(endpoint: str, revision: int) -> str:
    """Returns the name of the application of a challenger."""
    return f"{endpoint}{REVISION_SEPARATOR}{revision}"


def endpoint_of(application: str) -> str:
    """Returns the name of the endpoint that an application belongs to."""
    return application.partition(REVISION_SEPARATOR)[0]
