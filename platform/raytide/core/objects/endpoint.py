"""An endpoint: a model served over HTTP by replicas whose number follows the load."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2s
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.objects.api_key import HostedBackend, TokenPrice
from raytide.core.objects.gang import Needed
from raytide.core.objects.hardware.resources import RESOURCE_WORDS, expand
from raytide.core.objects.hardware.transfer import DataInput
from raytide.core.objects.node import ScheduledMinimum

_NUMBERED = re.compile(r"(job|lease|node)-[0-9]+")
ENDPOINT_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
_RESERVED = frozenset({"cluster", "unmanaged", "minimum", "warm", "queue"})


HOSTED = "hosted"
"""The model of an endpoint without replicas, which a hosted API answers."""
ADAPTER_SEPARATOR = ":"
"""The separator between endpoint and adapter in the name of a model."""
MOST_ADAPTERS = 64
ImageHost = Annotated[
    str, StringConstraints(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[1-9][0-9]{0,4})?$")
]
AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class Speed(Config):
    """Measured speed of one replica on one node type."""

    prefill_tps: float = Field(ge=1e-3, le=1e9)
    """Prompt tokens a second while the replica does nothing else."""
    slots: int = Field(ge=1, le=100_000)
    """The number of sequences that the replica decodes concurrently."""
    tpot_ms: float = Field(ge=1e-3, le=1e6)
    """Milliseconds between tokens of a sequence while all slots are taken."""


METERS = ("cpu", "gpu", "memory")
"""The signals that raytide measures on nodes; all other signals are reported by users."""


class ScaleSignal(Config):
    """A value, other than the number of requests, by which an endpoint scales. The value is measured on the endpoint's
    nodes or reported by users.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")
    """The name: `gpu`, `cpu` or `memory` for the mean use of the nodes with replicas, or the name of a value that `POST
    /v1/endpoints/NAME/signals` reports, such as the length of a queue.
    """
    target: float = Field(ge=1e-9, le=1e12)
    """The target: for a measured signal, the use of nodes from 0 to 1; for a reported one, the amount that one replica
    should carry.
    """

    @model_validator(mode="after")
    def _share(self) -> ScaleSignal:
        if self.name in METERS and self.target > 1:
            raise ValueError(f"the target of {self.name} is a share of the nodes: 0 to 1, not {self.target:g}")
        return self


class Replicas(Config):
    """The rules for an endpoint's number of replicas. Requests, KV caches, work and signals each need a number of
    replicas. The endpoint gets the largest of these numbers, within `min` and `max`.
    """

    min: int = Field(default=1, ge=0, le=bounds.MOST_REPLICAS)
    """With 0 the last replica ends after `downscale_delay_s` without a request; the next request waits for a new
    one."""
    max: int = Field(default=1, ge=1, le=bounds.MOST_REPLICAS)
    target_ongoing: float = Field(default=8.0, ge=1e-3, le=1e6)
    """Requests in flight or waiting that one replica should carry."""
    target_kv: float = Field(default=0.85, ge=1e-3, le=1)
    """The target share of the KV caches in use."""
    speed: dict[bounds.Name, Speed] = Field(default_factory=dict, max_length=bounds.MOST_LABELS)
    """The speed of a replica by node type. By default it is learned from replicas that had requests waiting for a
    while.
    """
    slo_ttft_s: float | None = Field(default=None, ge=1e-3, le=86400)
    """The seconds to the first token.

    Without `slo_target`, one replica more than the ready ones is requested while first tokens take longer on average.
    """
    slo_target: float | None = Field(default=None, ge=1e-3, le=0.99999)
    """The share of requests whose first token should arrive within `slo_ttft_s`.

    With it, replicas are added, on spot or on demand, as long as they prevent enough late requests for their price.
    `target_ongoing` and the delays then count only while `speed` is neither configured nor learned.
    """
    cold_start_s: float = Field(default=60.0, ge=1e-3, le=86400)
    """The seconds from requesting a replica to its first answer, until they are learned from observed starts."""
    upscale_delay_s: bounds.Seconds = 0.0
    downscale_delay_s: bounds.Seconds = 30.0
    """The time for which the load must have been lower before a replica is removed."""
    schedule: tuple[ScheduledMinimum, ...] = Field(default=(), max_length=100)
    """Minimums by hour and weekday, which replace `min` while they apply; of several, the largest counts."""
    scale_on: tuple[ScaleSignal, ...] = Field(default=(), max_length=16)
    """Further signals to scale on. No replica is removed while a signal has no value."""

    @model_validator(mode="after")
    def _signals(self) -> Replicas:
        if len({signal.name for signal in self.scale_on}) < len(self.scale_on):
            raise ValueError("scale_on names a signal twice")
        if self.scale_on and self.slo_target is not None:
            raise ValueError("scale_on cannot be combined with slo_target, which sets the replicas alone")
        if any(entry.min > self.max for entry in self.schedule):
            raise ValueError(f"schedule has a min above max {self.max}")
        if self.slo_target is not None and any(entry.min == 0 for entry in self.schedule):
            raise ValueError("slo_target needs a min of at least 1 at all hours: a cold start is never in time")
        return self

    @model_validator(mode="after")
    def _order(self) -> Replicas:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        if self.slo_target is not None and self.slo_ttft_s is None:
            raise ValueError("slo_target needs slo_ttft_s: the time within which a first token is in time")
        if self.slo_target is not None and self.min == 0:
            raise ValueError("slo_target needs a min of at least 1: a cold start is never in time")
        return self

    def at(self, at_s: float) -> Replicas:
        """Returns these rules with `min` replaced by the minimum that is scheduled for this time (seconds since the
        epoch)."""
        minimums = [entry.min for entry in self.schedule if entry.holds(at_s)]
        return self.model_copy(update={"min": max(minimums)}) if minimums else self

    @property
    def least(self) -> int:
        """The smallest of the minimum replica counts: the usual one and those of the schedule."""
        return min(self.min, *(entry.min for entry in self.schedule)) if self.schedule else self.min

    @property
    def most(self) -> int:
        """The largest number of replicas at any time. With an SLO it is twice `max`, because new spot replicas run
        beside the on-demand replicas that they replace."""
        return self.max if self.slo_target is None else 2 * self.max


class AnswerCachePolicy(Config):
    """The settings of the gateway's cache of exact answers to greedy and seeded requests. An answer is shared only
    within the team that sent the request. If requests need API keys, only answers for keys with `answer_cache` are
    stored."""

    ttl_s: float = Field(default=300.0, gt=0, le=86_400)
    max_mb: int = Field(default=64, ge=1, le=4096)
    """The memory in MB in each gateway process."""


class PrefillPolicy(Config):
    """The settings of disaggregated prefill. The replicas of another endpoint compute the prompts and hand over the KV
    cache, so decoding never waits for prompts."""

    endpoint: str = Field(pattern=ENDPOINT_NAME)
    """The endpoint that computes prompts: one of the same team with the same model and engine options. While it has no
    replica, prompts are computed by the replica that decodes.
    """
    min_tokens: int = Field(default=1024, ge=1, le=10_000_000)
    """The fewest prompt tokens, without those cached at the decoding replica, that are computed elsewhere; shorter
    prompts are computed by the decoding replica.
    """


class ServeSpec(Config):
    """The specification of an endpoint, as `raytide serve` sends it: the model, its resources and its replicas."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}(~[1-9][0-9]{0,9})?$")
    """The name of the endpoint, which is also the OpenAI model name. Only raytide adds `~` and a number, for the
    revisions of a rollout.
    """
    model: bounds.Location
    """The model: a Hugging Face directory that every node can read, its URL in an object store, from which each node
    copies it once, or a registered model.

    A registered model is `registry:NAME@ALIAS` or `registry:NAME:VERSION`; the API replaces it by its location.
    """
    backend: HostedBackend | None = None
    """A hosted API that answers in place of replicas; `model` is left out then."""
    fallback: HostedBackend | None = None
    """A hosted API that answers while no replica is ready, or all are full."""
    adapters: dict[AdapterName, bounds.Location] = Field(default_factory=dict, max_length=MOST_ADAPTERS)
    """LoRA adapters by name, each addressed as the model `NAME:ADAPTER`: directories, URLs or registered models, as
    `model` is. Replicas load and unload them while they run."""
    weights: bounds.Location = ""
    """Weights of the same architecture in place of the model's, which replicas swap one after the other while they run:
    a directory, a URL or a registered model."""
    version: bounds.Word = ""
    """The registered version in `model`, as `NAME:VERSION`; the API sets it."""
    team: bounds.Name = "default"
    priority: bounds.Name | None = None
    """A class of `metadata.raytide.priorities`. Replicas that do not fit preempt spare members of elastic gangs of
    lower classes; by default, of all classes.
    """
    project: bounds.Word = ""
    """A label to group costs by."""
    replicas: Replicas = Field(default_factory=Replicas)
    resources: Needed = Field(default_factory=lambda: {"CPU": 1.0})
    """The resources of one replica, or of each of its members."""
    members: int = Field(default=1, ge=1, le=64)
    """The members of one replica, each on one node, which start together or not at all. More than one is for engines
    that span nodes.
    """
    labels: bounds.Labels = Field(default_factory=dict)
    """A label selector for its nodes."""
    inputs: tuple[DataInput, ...] = Field(default=(), max_length=100)
    """The data that each replica reads, from which the price of getting them to a node is computed. By default it is
    the model, if its size is known.
    """
    engine: dict[str, object] = Field(default_factory=dict)
    """Options of the engine, as `raytide.LLM` takes them."""
    pip: bounds.Requirements = ()
    """Packages that the engine needs in addition to raytide's, such as `vllm==0.19`. They are installed once on each
    node, with the node's own configuration of pip.
    """
    max_ongoing: int = Field(default=256, ge=1, le=100_000)
    """The most requests that a replica handles at once; further requests to it wait in the router."""
    min_request_priority: int = Field(default=0, ge=-100, le=0)
    """The most urgent priority that requests may have (lower is more urgent); more urgent requests get this priority.
    """
    price: TokenPrice = TokenPrice()
    """The price of tokens, which the gateway bills to API keys."""
    answer_cache: AnswerCachePolicy | None = None
    """If set, the answer to a request is reused for later equal requests; None: equal requests share an answer only
    while in flight together.
    """

    image_hosts: tuple[ImageHost, ...] = Field(default=(), max_length=64)
    """Hosts from which the gateways fetch the images of requests: `NAME`, `*.NAME`, or either with `:PORT`; by default
    images are read from data URLs only. Their addresses must be public."""
    prefill: PrefillPolicy | None = None
    """The endpoint that computes prompts; None: they are computed where they are decoded."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, fields: object) -> object:
        """Expands the keywords `gpus`, `cpus`, `memory` and `spot` (see `raytide.core.objects.hardware.resources`) to
        resources and labels of the replica.
        """
        if isinstance(fields, Mapping) and fields.get("backend") is not None:
            fields = {"model": HOSTED, "replicas": {"min": 0}, **fields}
        return expand(fields, RESOURCE_WORDS) if isinstance(fields, Mapping) else fields

    @property
    def served(self) -> str:
        """A digest of the model, resources, members and engine options. If two specs have the same digest, their
        replicas do the same work on the same share of a node.
        """
        work = self.model_dump(mode="json", include={"model", "resources", "members", "engine"})
        return blake2s(json.dumps(work, sort_keys=True).encode(), digest_size=8).hexdigest()

    @model_validator(mode="after")
    def _whole(self) -> ServeSpec:
        if self.members * self.replicas.max > bounds.MOST_MEMBERS:
            raise ValueError(f"members x replicas.max is above {bounds.MOST_MEMBERS}")
        if self.backend is not None and (self.model != HOSTED or self.replicas.min or self.adapters or self.fallback):
            raise ValueError("backend is for an endpoint without model, replicas, adapters and fallback")
        if self.backend is not None and self.weights:
            raise ValueError("backend is for an endpoint without weights")
        if self.pip and (self.backend is not None or self.members > 1):
            raise ValueError("pip is for replicas of one member, in whose engine the packages are")
        if self.members > 1 and self.replicas.slo_target is not None:
            raise ValueError("slo_target is for replicas of one member: leave it out, or members")
        if self.prefill is not None and self.prefill.endpoint == self.name:
            raise ValueError("prefill.endpoint is this endpoint: name another one with the same model")
        return self

    @field_validator("name")
    @classmethod
    def _not_a_name_of_ours(cls, name: str) -> str:
        """Rejects names that raytide uses itself: events, costs and waits are reported by name, which must be
        unique."""
        if name in _RESERVED or _NUMBERED.fullmatch(name):
            raise ValueError(f"{name} is a name that raytide gives itself; choose another")
        return name


LIVE_FIELDS = frozenset({"adapters", "inputs", "prefill", "weights"})
"""The fields of a ServeSpec that replicas follow while they run; all others need new replicas."""


def adapter_id(name: str, location: str) -> str:
    """Returns the name by which engines know an adapter. It contains a hash of the adapter's location. So an engine can
    load a changed adapter while running requests finish with the old one."""
    return f"{name}-{blake2s(location.encode(), digest_size=4).hexdigest()}"


def adapted_models(name: str, spec: ServeSpec) -> tuple[str, ...]:
    """Returns the model names under which OpenAI clients reach an endpoint's adapters."""
    return tuple(f"{name}{ADAPTER_SEPARATOR}{adapter}" for adapter in sorted(spec.adapters))


UPDATE_FAILED = "its update failed, and replicas of the spec before serve on: "
"""The beginning of the reason of an endpoint whose new spec Serve gave up while replicas of an earlier spec answer."""


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
    """The number of replicas that was last published as the target."""
    low_since_s: float | None = None
    """The time since which the load has needed fewer replicas than `target_replicas`; None if it needs them all."""
    high_since_s: float | None = None
    ended_at_s: float | None = None
    reason: str = ""
    unreadable: str = ""
    """The error of the stored spec, if an earlier release accepted it and this one rejects it; `spec` is then a
    placeholder.
    """

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_given_up(self) -> bool:
        """True if Serve does not try to start replicas of the spec any more."""
        return self.state is EndpointState.FAILED or self.reason.startswith(UPDATE_FAILED)

    def at(self, at_s: float) -> Endpoint:
        """Returns the endpoint with its minimum number of replicas replaced by the minimum that is scheduled for this
        time (seconds since the epoch).
        """
        if not self.spec.replicas.schedule:
            return self
        replicas = self.spec.replicas.at(at_s)
        return replace(self, spec=self.spec.model_copy(update={"replicas": replicas}))


@dataclass(frozen=True, slots=True)
class EndpointRevision:
    """A spec that an endpoint has or had, with its revision number."""

    name: str
    number: int
    """The revision's number, from 1. It continues when an endpoint of this name is deleted and created again."""
    team: str
    user: str
    at_s: float
    why: str
    spec: ServeSpec | None
    """The spec; None if an earlier release stored it and this one rejects it."""
    unreadable: str = ""
    """The error of the stored spec."""
