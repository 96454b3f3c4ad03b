"""Metrics of endpoints, each of which may have several applications during a rollout."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from statistics import fmean

from raytide.control.views import Live
from raytide.core.money import MICRO
from raytide.core.objects.endpoint import Replicas
from raytide.core.objects.endpoint_load import LOADING, EndpointLoad, Traffic
from raytide.core.objects.ledger_entry import EntryKind, OpenInterval
from raytide.core.specs.rollout import Rollout, endpoint_of
from raytide.core.state import Store
from raytide.core.telemetry.catalogue import application, client, cost, model
from raytide.core.telemetry.metrics import MetricSample, ValueRecorder
from raytide.ledger.report import rate_micro_usd_h
from raytide.registry.rollout.lifecycle import proven_regressions

_ERROR_BUDGET = 0.01
"""The share of requests that may exceed the SLO's time to first token, if the endpoint has no `slo_target`."""
REGRESSION_SHOWN_S = 3600.0
"""The time for which the metrics show that a canary was rolled back, and why."""


def endpoint_samples(store: Store, live: Live, intervals: Sequence[OpenInterval]) -> Iterator[MetricSample]:
    """Yields for each endpoint its target number of replicas, the load that replicas and routers report, the cost, and
    the users' feedback."""
    targets: defaultdict[str, dict[str, int]] = defaultdict(dict)
    promises: dict[str, Replicas] = {}
    for endpoint in store.endpoints():
        targets[endpoint_of(endpoint.name)][endpoint.name] = endpoint.target_replicas
        promises.setdefault(endpoint_of(endpoint.name), endpoint.spec.replicas)  # the champion's comes first
    for name, applications in sorted(targets.items()):
        loads = [load for each in applications if (load := live.loads.get(each)) is not None]
        yield MetricSample(application.REPLICAS_TARGET, sum(applications.values()), (name,))
        yield MetricSample(application.REPLICAS_READY, sum(load.ready for load in loads), (name,))
        yield from _promise_samples(name, promises[name])
        if loads:
            yield from _load_samples(name, loads)
        tokens_per_h = 3600.0 * sum(load.traffic.output_tps for load in loads if load.traffic is not None)
        if tokens_per_h > 0:
            micro_usd_h = sum(rate_micro_usd_h(intervals, EntryKind.ENDPOINT, each) for each in applications)
            yield MetricSample(cost.USD_PER_MTOKEN, micro_usd_h / MICRO / tokens_per_h * 1e6, (name,))
            if (watts := _watts(live, intervals, applications)) > 0:
                yield MetricSample(cost.TOKENS_PER_JOULE, tokens_per_h / 3600.0 / watts, (name,))
    for endpoint_name, revision, up, down in store.feedback.totals():
        for thumb, count in (("up", up), ("down", down)):
            yield MetricSample(client.FEEDBACK, count, (endpoint_name, str(revision or ""), thumb))


def _watts(live: Live, intervals: Sequence[OpenInterval], applications: Container[str]) -> float:
    """Returns the watts of the applications' shares of their nodes; nodes without a measurement count nothing."""
    watts = 0.0
    for interval in intervals:
        measured = live.measured.get(interval.node_id)
        if measured is not None:
            shares = interval.occupancy
            own = sum(s.weight for s in shares if s.kind is EntryKind.ENDPOINT and s.subject in applications)
            watts += sum(measured.power_w.values()) * own / sum(share.weight for share in shares)
    return watts


def _promise_samples(endpoint: str, replicas: Replicas) -> Iterator[MetricSample]:
    """Yields the SLO's time to first token in seconds, and the share of requests that may exceed it."""
    if replicas.slo_ttft_s is not None:
        yield MetricSample(application.SLO_FIRST_TOKEN, replicas.slo_ttft_s, (endpoint,))
        budget = _ERROR_BUDGET if replicas.slo_target is None else round(1.0 - replicas.slo_target, 6)
        yield MetricSample(application.SLO_ERROR_BUDGET, budget, (endpoint,))


def _load_samples(endpoint: str, loads: Sequence[EndpointLoad]) -> Iterator[MetricSample]:
    if adapters := Counter(
        _adapter_state(each) for load in loads for live in load.live for each in live.adapters.values()
    ):
        counts = {**dict.fromkeys(("loaded", "loading", "failed"), 0), **adapters}
        yield from (MetricSample(model.ADAPTERS, count, (endpoint, state)) for state, count in counts.items())
    yield MetricSample(application.ONGOING, sum(load.ongoing for load in loads), (endpoint,))
    if kv_use := [replica.kv_use for load in loads for replica in load.replicas]:
        yield MetricSample(model.KV_USE, fmean(kv_use), (endpoint,))
    if traffic := [load.traffic for load in loads if load.traffic is not None]:
        yield MetricSample(application.REQUEST_RATE, sum(each.requests_rps for each in traffic), (endpoint,))
        yield MetricSample(application.REQUEST_FORECAST, sum(each.ahead_rps for each in traffic), (endpoint,))
        yield MetricSample(application.OUTPUT_RATE, sum(each.output_tps for each in traffic), (endpoint,))
        if (first_token_s := _first_token_s(traffic)) is not None:
            yield MetricSample(application.FIRST_TOKEN, first_token_s, (endpoint,))


def _adapter_state(reported: str) -> str:
    return "failed" if reported not in ("", LOADING) else reported or "loaded"


def canary_samples(rolled_back: Sequence[Rollout]) -> Iterator[MetricSample]:
    """Yields samples about the newest rolled-back canary of each endpoint. There is one sample for each criterion that
    caused the rollback. Its value says by how much the challenger was worse than the champion. `rolled_back` is sorted
    newest first.
    """
    newest: dict[str, Rollout] = {}
    for rollout in rolled_back:
        newest.setdefault(rollout.name, rollout)
    for name, rollout in sorted(newest.items()):
        for criterion, excess in proven_regressions(rollout).items():
            yield MetricSample(application.CANARY_REGRESSION, excess, (name, criterion))


def _first_token_s(traffic: Sequence[Traffic]) -> float | None:
    """Returns the mean time to a first token over all requests."""
    known = [(each.ttft_s, each.requests_rps) for each in traffic if each.ttft_s is not None]
    if not known:
        return None
    requests = sum(weight for _, weight in known)
    return sum(s * weight for s, weight in known) / requests if requests else fmean(s for s, _ in known)


class ReplicaRestarts:
    """Counts the replicas that were replaced by another one since this process started."""

    def __init__(self) -> None:
        self._known: dict[str, frozenset[str]] = {}
        self._restarts = ValueRecorder(application.REPLICA_RESTARTS)

    def observe(self, loads: Mapping[str, EndpointLoad]) -> None:
        """Counts, for each application, how many of its replicas were replaced since the last call."""
        for name, load in loads.items():
            now = frozenset(startup.id for startup in load.startups)
            before = self._known.get(name, now)
            replaced = min(len(before - now), len(now - before))
            self._restarts.add(endpoint_of(name), amount=replaced)
            self._known[name] = now
        self._known = {name: known for name, known in self._known.items() if name in loads}

    def samples(self) -> Iterator[MetricSample]:
        return self._restarts.samples()
