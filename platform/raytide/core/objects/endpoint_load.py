"""The load of an endpoint: the reports of its replicas, what was learned from them, and the value of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

from raytide.core.objects.endpoint import Speed


@dataclass(frozen=True, slots=True)
class Counters:
    """The totals of one engine since its start."""

    requests: float = 0.0
    """The number of requests; each prompt of an HTTP request counts as one."""
    prompt_tokens: float = 0.0
    """The prompt tokens, without those found in the prefix cache."""
    output_tokens: float = 0.0
    first_tokens: float = 0.0
    first_token_s: float = 0.0
    """The sum of the times to first token, in seconds."""
    finished: float = 0.0
    """The number of finished requests, whose tokens are counted."""
    late: float = 0.0
    """The number of requests that had no first token within `slo_ttft_s`, or were refused."""

    def plus(self, other: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def since(self, before: Counters) -> Counters:
        return Counters(*(max(0.0, a - b) for a, b in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The last report of one replica's engine."""

    id: str
    at_s: float
    running: float = 0.0
    waiting: float = 0.0
    kv_use: float = 0.0
    """The share of its KV cache in use."""
    counters: Counters = Counters()
    node: str = ""
    """Ray's id of its node."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The demand on an endpoint. `autoscaler/endpoints/traffic.py` measures and forecasts it."""

    requests_rps: float = 0.0
    """The requests per second. All rates are those of the last half minute."""
    prompt_tps: float = 0.0
    output_tps: float = 0.0
    ttft_s: float | None = None
    """The mean time to first token; None without requests."""
    ahead_rps: float = 0.0
    """The requests per second expected at the end of a cold start: the usual rate at that time, but at least the
    present one.
    """
    request_s: float | None = None
    """Replica-seconds per request; None while the replicas' speed is unknown."""
    speed: Speed | None = None
    """The configured or learned speed of one replica: the mean over node types or, if their `paces` differ, that of the
    slowest.
    """
    paces: Mapping[str, float] = field(default_factory=dict)
    """A replica's throughput on each eligible node type, relative to the slowest; empty if no differences are known."""
    held: tuple[float, ...] = ()
    """The relative throughput of each of the load's `replica_nodes`; empty if all are equal."""
    next_pace: float = 1.0
    """The relative throughput of a replica on the node type that is cheapest per work."""
    too_slow: tuple[str, ...] = ()
    """Node types on which even a prompt of mean length takes longer than `slo_ttft_s`, while others are faster."""
    cold_start_s: float | None = None
    """The learned seconds from ordering a node to the first answer; None while the spec's `cold_start_s` applies."""


@dataclass(frozen=True, slots=True)
class ReplicaStartup:
    """The progress of one replica's start."""

    id: str
    ordered_at_s: float
    phases: tuple[tuple[str, float], ...]
    """The phases so far, of `node`, `process`, `stage`, `load` and `warm-up`, with the seconds of each."""
    is_ready: bool
    detail: str = ""
    """The copied bytes of a model in an object store, as text."""


LOADING = "loading"


@dataclass(frozen=True, slots=True)
class ReplicaLive:
    """The adapters and weights that a running replica has loaded. They can change without a new replica."""

    id: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The state of each adapter by name: "" if it is loaded, LOADING, or the error."""
    weights: str = ""
    """The location of the replica's weights; "" for the weights of the spec's model."""
    asked: str = ""
    """The location of the weights that the replica was last asked to load."""
    error: str = ""
    """The error of the last swap of weights."""


@dataclass(frozen=True, slots=True)
class ReplicaLog:
    """The files with a replica's output. The agent of the replica's node serves them while the node lives."""

    replica: str
    began_at_s: float
    agent: str
    """`host:port` of the agent."""
    files: tuple[str, ...]
    node: str = ""
    """Ray's id of the node; empty if the replica began before such ids were published."""


@dataclass(frozen=True, slots=True)
class InstallFailure:
    """The last failure of a replica to install its endpoint's packages."""

    why: str
    node: str
    """Ray's id of its node."""
    is_final: bool
    """True if pip can never install them; otherwise the replica tries again."""


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """The last reports of an endpoint's replicas and router, and the time of Serve's last report."""

    at_s: float
    ongoing: float
    """The requests in progress or waiting anywhere: the larger of Serve's count and the engines' count."""
    ready: int
    """The number of replicas that answer."""
    replica_nodes: tuple[str, ...] = ()
    """Ray's node id of each replica that has a node, including replicas that start; for a replica of several members,
    the id of each member's node.
    """
    replicas: tuple[ReplicaLoad, ...] = ()
    """The last report of each ready replica."""
    traffic: Traffic | None = None
    queued: float = 0.0
    """The number of requests that no replica has accepted yet, so that no replica counts them."""
    moving: tuple[str, ...] = ()
    """The part of `replica_nodes` with replicas of several members that Serve is moving."""
    startups: tuple[ReplicaStartup, ...] = ()
    """The starts of all replicas that run or start."""
    live: tuple[ReplicaLive, ...] = ()
    signals: Mapping[str, float] = field(default_factory=dict)
    """The present value of each signal of `scale_on`; signals without a fresh value are missing."""
    logs: tuple[ReplicaLog, ...] = ()
    """The logs of the newest replicas, including ended ones."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """`host:port` of the metrics page of each replica that answers."""
    install: InstallFailure | None = None


@dataclass(frozen=True, slots=True)
class ReplicaValue:
    """The value of the replicas of an endpoint with an SLO. `spot` and `ondemand` say how many replicas are worth their
    price. `autoscaler/endpoints/replica_value.py` computes these numbers."""

    spot: int
    """The number of replicas that are worth the price of spot, including those on standby."""
    ondemand: int
    """The number of replicas that are worth the price of on-demand."""
    late_usd: float
    """The value of preventing one late request."""
    late_per_h: tuple[float, ...]
    """Late requests per hour with 0, 1, 2... replicas."""
    usual_rps: float
    together: float
    """The probability that when one zone of the region is lost, another is lost with it."""
    is_sure: bool = True
    """False until the observation is long enough to remove replicas."""
    least: int = 0
    """The most replicas that the KV caches needed over the last `downscale_delay_s`."""
    slo_target: float | None = None
    """The share of requests that should be in time; None if none is configured."""
    attained: float | None = None
    """The share of requests that were in time over about the last week; None without requests."""
    busy: int = 0
    """The part of `spot` that the usual request rate keeps busy."""
    standby: int = 0
    """The part of `spot` that is worth the on-demand price, since it is never reclaimed."""
    for_bursts: int = 0
    """The part of `spot` beyond `busy` that bursts need even if no node is ever lost; the rest is held for losses and
    for a backlog."""
