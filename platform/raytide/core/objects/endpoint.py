"""An endpoint: a model served over HTTP by replicas whose number follows the load."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from hashlib import blake2s

from pydantic import Field, field_validator, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.objects.gang import Needed
from raytide.core.objects.resources import RESOURCE_WORDS, expand

_NUMBERED = re.compile(r"(job|lease|node)-[0-9]+")
_RESERVED = frozenset({"cluster", "unmanaged", "minimum", "warm", "queue"})


class Speed(Config):
    """What one replica does on one type of node, as measured."""

    prefill_tps: float = Field(ge=1e-3, le=1e9)
    """Prompt tokens a second, when it does nothing else."""
    slots: int = Field(ge=1, le=100_000)
    """Sequences that it decodes side by side."""
    tpot_ms: float = Field(ge=1e-3, le=1e6)
    """From one token of a sequence to the next while all slots are taken."""


class Replicas(Config):
    """How many there are follows the largest of what requests, KV caches and work ask for."""

    min: int = Field(default=1, ge=1, le=bounds.MOST_REPLICAS)
    max: int = Field(default=1, ge=1, le=bounds.MOST_REPLICAS)
    target_ongoing: float = Field(default=8.0, ge=1e-3, le=1e6)
    """Requests in flight or waiting that one replica is meant to carry."""
    target_kv: float = Field(default=0.85, ge=1e-3, le=1)
    """How full the replicas' KV caches are meant to be."""
    speed: dict[bounds.Name, Speed] = Field(default_factory=dict, max_length=bounds.MOST_LABELS)
    """By node type. Where it is left out it is learned from replicas on which requests waited for a while."""
    slo_ttft_s: float | None = Field(default=None, ge=1e-3, le=86400)
    """Without `slo_target`: while first tokens take longer on average, there is one replica more than answer."""
    slo_target: float | None = Field(default=None, ge=1e-3, le=0.99999)
    """The share of requests whose first token is meant to come within `slo_ttft_s`. With it, as many replicas are
    wanted as spare enough late requests for their price, on spot and on demand; `target_ongoing` and the delays count
    only while `speed` is neither given nor learned."""
    cold_start_s: float = Field(default=60.0, ge=1e-3, le=86400)
    """From the decision for a replica to its first answer: what waits by then counts. Until it was learned from the
    starts that were seen."""
    upscale_delay_s: bounds.Seconds = 0.0
    downscale_delay_s: bounds.Seconds = 30.0
    """How long the load must have been below before a replica goes."""

    @model_validator(mode="after")
    def _order(self) -> Replicas:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        if self.slo_target is not None and self.slo_ttft_s is None:
            raise ValueError("slo_target is the share that is in time: slo_ttft_s must say what is in time")
        return self

    @property
    def most(self) -> int:
        """With an SLO there may be more than `max` while on-demand replicas wait for those on spot to replace them."""
        return self.max if self.slo_target is None else 2 * self.max


class ServeSpec(Config):
    """`raytide serve`: which model, on what, and how many of it."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Also the OpenAI model name."""
    model: bounds.Location
    """A Hugging Face directory that every node can read."""
    team: bounds.Name = "default"
    priority: bounds.Name | None = None
    """A class of `metadata.raytide.priorities`: replicas take seats of elastic gangs of a lower one when there is no
    room else. Of any class when left out."""
    project: bounds.Word = ""
    """A way to group costs."""
    replicas: Replicas = Replicas()
    resources: Needed = Field(default_factory=lambda: {"CPU": 1.0})
    """Of one replica, or of each of its members."""
    members: int = Field(default=1, ge=1, le=64)
    """Of one replica: all of them or none, each whole on one node. More than one is for engines that span nodes."""
    labels: bounds.Labels = Field(default_factory=dict)
    """Label selector for its nodes."""
    engine: dict[str, object] = Field(default_factory=dict)
    """Options of the engine, as `raytide.LLM` takes them."""
    max_ongoing: int = Field(default=256, ge=1, le=100_000)
    """More at once in one replica wait in the router."""
    min_request_priority: int = Field(default=0, ge=-100, le=0)
    """The most urgent priority that a request may have (lower is more urgent); one that asks for more gets this."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, fields: object) -> object:
        """`gpus`, `cpus`, `memory` and `spot` (see `raytide.core.objects.resources`) stand for the replica's resources
        and labels."""
        return expand(fields, RESOURCE_WORDS) if isinstance(fields, Mapping) else fields

    @property
    def served(self) -> str:
        """The same for specs whose replicas do the same work on the same share of a node."""
        told = self.model_dump(mode="json", include={"model", "resources", "members", "engine"})
        return blake2s(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()

    @model_validator(mode="after")
    def _whole(self) -> ServeSpec:
        if self.members * self.replicas.max > bounds.MOST_MEMBERS:
            raise ValueError(f"members x replicas.max is above {bounds.MOST_MEMBERS}")
        if self.members > 1 and self.replicas.slo_target is not None:
            raise ValueError("slo_target is for replicas of one member: leave it out, or members")
        return self

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
    unreadable: str = ""
    """The error of its stored spec, which an earlier release took and this one refuses; `spec` stands in for it."""

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True, slots=True)
class Counters:
    """Of one engine since it started."""

    requests: float = 0.0
    """Each prompt of an HTTP request is one."""
    prompt_tokens: float = 0.0
    """Without those found in the prefix cache."""
    output_tokens: float = 0.0
    first_tokens: float = 0.0
    first_token_s: float = 0.0
    """How long all first tokens together took."""
    finished: float = 0.0
    """Requests whose tokens are counted."""
    late: float = 0.0
    """Requests whose first token came later than `slo_ttft_s`, or that were refused."""

    def plus(self, other: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def since(self, before: Counters) -> Counters:
        return Counters(*(max(0.0, a - b) for a, b in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica's engine said, and when."""

    id: str
    at_s: float
    running: float = 0.0
    waiting: float = 0.0
    kv_use: float = 0.0
    """Share of its KV cache that is taken."""
    counters: Counters = Counters()
    node: str = ""
    """Ray's id of the node on which it runs."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an endpoint is asked, learned by watching (`autoscaler/endpoints/traffic.py`)."""

    requests_rps: float = 0.0
    """Over the last half minute, as all of these that say nothing else."""
    prompt_tps: float = 0.0
    output_tps: float = 0.0
    ttft_s: float | None = None
    """Mean time to first token; None when there was none."""
    ahead_rps: float = 0.0
    """What is to be expected at the end of a cold start: the usual rate, never below that of now."""
    request_s: float | None = None
    """Replica-seconds that a request takes; None when the replicas' speed is not known."""
    speed: Speed | None = None
    """Of one replica, as configured or learned: the mean over the node types that serve; where `paces` differ, that of
    a replica where it is slowest."""
    paces: Mapping[str, float] = field(default_factory=dict)
    """What a replica does on each node type that could hold one, in units of where it does least; empty when all do
    alike, as far as is known."""
    held: tuple[float, ...] = ()
    """The same of each of the load's `replica_nodes`; empty when all do alike."""
    next_pace: float = 1.0
    """The same of a replica where the next one would cost least for what it does."""
    too_slow: tuple[str, ...] = ()
    """Node types on which even a prompt of the mean length takes longer than `slo_ttft_s`, while others are faster."""
    cold_start_s: float | None = None
    """How long its replicas took from the order of their node to their first answer; None while `cold_start_s` of its
    spec counts."""


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """What its replicas and its router said, and when Serve said it."""

    at_s: float
    ongoing: float
    """Requests being answered plus requests waiting anywhere, by Serve's count or by the engines', which is more."""
    ready: int
    """Replicas that answer."""
    replica_nodes: tuple[str, ...] = ()
    """The Ray node of each replica that has one, starting ones included; of one with several members, of all."""
    replicas: tuple[ReplicaLoad, ...] = ()
    """Of those that answer, what each said last of itself."""
    traffic: Traffic | None = None
    queued: float = 0.0
    """Requests that wait for a replica to take them: none has counted them yet."""
    moving: tuple[str, ...] = ()
    """Of `replica_nodes`, those of replicas with several members that Serve is moving elsewhere."""


@dataclass(frozen=True, slots=True)
class ReplicaValue:
    """How many replicas of an endpoint with an SLO are worth their price, learned by watching
    (`autoscaler/endpoints/replica_value.py`)."""

    spot: int
    """So many are worth the price of spot..."""
    ondemand: int
    """... and so many that of on demand."""
    late_usd: float
    """What it is worth that a request is not late."""
    late_per_h: tuple[float, ...]
    """Requests that will be late with 0, 1, 2... replicas."""
    usual_rps: float
    together: float
    """The chance that another zone of the region is lost with one."""
    is_sure: bool = True
    """False while it was watched for so short a time that nothing may be taken away."""
    least: int = 0
    """What the KV caches asked for at most, over the last `downscale_delay_s`."""
