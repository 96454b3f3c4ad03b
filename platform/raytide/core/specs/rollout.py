"""Stored rollouts. In a rollout, a new revision of an endpoint runs beside the revision that serves the endpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from raytide.core import bounds
from raytide.core.config import Config

REVISION_SEPARATOR = "~"
"""The separator between an endpoint's name and a revision's number in the name of an application. No endpoint's name
contains it.
"""
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
    """A rollout: a challenger revision runs beside the endpoint's champion, the revision that served before. Each of
    the two is a Ray Serve application."""

    number: int
    name: str
    """The name of the endpoint."""
    team: str
    user: str
    kind: RolloutKind
    plan: Mapping[str, Any]
    """The RolloutSpec as JSON."""
    champion: int
    """The revision that served the endpoint when the rollout began."""
    challenger: int
    champion_application: str
    challenger_application: str
    created_at_s: float
    why: str = ""
    asked: Literal["", "stop", "promote"] = ""
    """The end that a user has requested; empty if none has."""
    asked_by: str = ""
    asked_why: str = ""
    state: RolloutState = RolloutState.STARTING
    percent: float = 0.0
    """The challenger's share of traffic."""
    reason: str = ""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """The state of the decision, as JSON."""
    decided_at_s: float | None = None
    """The time of the outcome; None until the rollout is decided."""
    ended_at_s: float | None = None
    """The time at which the losing application was gone."""

    @property
    def loser(self) -> str:
        """The application that ends with the rollout: the champion's application after a promotion, otherwise the
        challenger's."""
        return self.champion_application if self.state is RolloutState.PROMOTED else self.challenger_application


@dataclass(frozen=True, slots=True)
class Serving:
    """The application and revision that serve an endpoint."""

    name: str
    application: str
    """The name of its record in `endpoints` and of its application in Ray Serve."""
    revision: int
    previous: int = 0
    """The revision that served before this one; 0 if there is none."""


_Count = Annotated[int, Field(ge=0, le=2**53)]


class CountedRevision(Config):
    """Counts of the requests to one revision. A gateway reports its totals since it started, so a repeated report
    changes nothing. The store returns the sums over all gateways.

    `RevisionCounts` in `raytide.registry.rollout.canary` defines the counts.
    """

    rollout: int = Field(ge=1, le=2**53)
    revision: int = Field(ge=1, le=2**31)
    requests: _Count = 0
    errors: _Count = 0
    started: _Count = 0
    late: _Count = 0
    first_token_ms: _Count = 0
    """The sum of the milliseconds to first token, over the `started` requests."""
    compared: _Count = 0
    """The number of greedy answers that were compared with the champion's."""
    equal: _Count = 0
    judged: _Count = 0
    """The number of judged answers. Gateways leave it and `disliked` at 0: thumbs come through the API."""
    disliked: _Count = 0


class RolloutReport(Config):
    most_bytes: ClassVar[int] = MOST_COUNT_BYTES

    gateway: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    counted: tuple[CountedRevision, ...] = Field(default=(), max_length=1000)


Score = Literal["up", "down"]
MetricName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
"""The name of a number that users report for answers."""
MOST_METRICS = 16
"""The most metrics of one answer."""
MetricValue = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]


class Feedback(Config):
    """A user's judgement of an answer: a thumb up or down, or the value of one of the user's own metrics."""

    request_id: Annotated[str, StringConstraints(pattern=r"^[!-~]{1,100}$")]
    """The id of the response."""
    score: Score | None = None
    metric: MetricName | None = None
    value: MetricValue | None = None
    comment: Annotated[str, StringConstraints(max_length=4096)] = ""
    team: bounds.Name = "default"
    """The team of the request. The gateway fills in this field, `key` and `model`."""
    key: Annotated[str, StringConstraints(max_length=64)] = ""
    model: bounds.Word = ""
    """The endpoint's name, if the request's address contains it."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        check_one_judgement(self.score, self.metric, self.value)
        return self


def check_one_judgement(score: Score | None, metric: str | None, value: float | None) -> None:
    """Raises ValueError unless exactly one of two things is given: a score, or a metric with a value."""
    if (score is None) == (metric is None) or (metric is None) != (value is None):
        raise ValueError("give a score, or a metric and its value")


@dataclass(frozen=True, slots=True)
class RevisionFeedback:
    """The users' judgements of the answers that one revision gave."""

    revision: int
    up: int
    down: int
    metrics: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """The number of values and their mean, by metric."""


class MetricLimit(Config):
    """The limits of a metric's good values. An answer with a value under `below` or over `above` is bad."""

    below: MetricValue | None = None
    above: MetricValue | None = None

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.below is None and self.above is None:
            raise ValueError("give below or above: the values on that side are bad")
        return self


_SERVED = re.compile(r"(?:^| )r([0-9]+)$")


def served_version(version: str, revision: int) -> str:
    """Returns the version for usage records: the registered version and the revision, such as `chat:2 r7`. Unknown
    parts are left out.
    """
    return " ".join(filter(None, [version, f"r{revision}" if revision else ""]))


def served_revision(served: str) -> int:
    """Returns the revision in a text that `served_version` made. Returns 0 if the text has no revision."""
    found = _SERVED.search(served)
    return int(found[1]) if found else 0


def id_in_group(request_id: str, group: int) -> str:
    """Returns the request's id with the last two digits replaced by the number (0 to 99) of the user's group in an A/B
    test. When the answer is judged later, the id shows the group.
    """
    return f"{request_id[:-2]}{group:02d}"


def group_in_id(request_id: str) -> int:
    """Returns the group in an id that `id_in_group` made. Returns -1 if the id has no group."""
    return int(request_id[-2:]) if re.fullmatch(r"[0-9]{2}", request_id[-2:]) else -1


def application_of(endpoint: str, revision: int) -> str:
    """Returns the name of the Ray Serve application for revision `revision` of `endpoint`. The application runs this
    revision as a challenger.
    """
    return f"{endpoint}{REVISION_SEPARATOR}{revision}"


def revision_of(application: str) -> str:
    """Returns the revision in the name of a challenger's application, as text.

    Returns an empty text for an endpoint's first application. That application serves one revision after another, so
    its name contains no revision.
    """
    return application.partition(REVISION_SEPARATOR)[2]


def endpoint_of(application: str) -> str:
    """Returns the name of the endpoint to which an application belongs."""
    return application.partition(REVISION_SEPARATOR)[0]
