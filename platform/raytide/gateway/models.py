"""The endpoints of a cluster as models of the OpenAI API: lists the models, and finds the server of each model."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast
from uuid import uuid4

from fastapi import Request
from pydantic import BaseModel

from raytide.actors.serving.http.app import api_of
from raytide.actors.serving.metrics import engine_samples
from raytide.actors.serving.openai_api.admission import HEADERS, caller_of
from raytide.actors.serving.openai_api.answers.bodies import Model
from raytide.actors.serving.openai_api.chat.image_fetcher import ImageFetcher
from raytide.actors.serving.openai_api.errors import ApiError, invalid, to_api_error
from raytide.actors.serving.openai_api.respond import in_request, outcome_of, session_of
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import ChatRequest, CompletionRequest
from raytide.actors.serving.ray_serve.keys import queue_key
from raytide.core.errors import WaitTimeoutError
from raytide.core.objects.api_key import HostedBackend
from raytide.core.objects.endpoint import ADAPTER_SEPARATOR, ServeSpec, adapted_models, adapter_id
from raytide.core.specs.rollout import CountedRevision, served_version
from raytide.core.telemetry.catalogue.application import REQUESTS
from raytide.core.telemetry.metrics import Sample, ValueRecorder
from raytide.gateway.answers.answer_quality import AnswerQuality
from raytide.gateway.hosted import HostedApis, fallback_of
from raytide.gateway.replicas.directory import Directory, EndpointEntry, Listing
from raytide.gateway.replicas.prefill_pool import PrefillPool
from raytide.gateway.replicas.replica_set import ReplicaSet
from raytide.gateway.replicas.routed_engine import COLD_START_S, GIVES_WAY, RoutedEngine
from raytide.gateway.rollouts.choice import champion_may_answer, is_for_challenger, is_for_fallback, is_overload
from raytide.gateway.rollouts.counting import CountedMetrics, RevisionTally
from raytide.gateway.rollouts.shadow import ShadowTraffic

ENDPOINT = "raytide.endpoint"
"""The key in an ASGI scope of the endpoint that the path names, if it names one."""
_REPORT_S = 1.0
_MOST_TALLIES = 500
"""The most revisions of rollouts whose counts are kept: the running ones and the latest ended ones. A report may have
1,000."""
_FELL_BACK_S = 5.0
"""The seconds for which a request that a hosted API answered counts as a waiting one, so that replicas start."""


T = TypeVar("T")


@dataclass(slots=True)
class _Application:
    """One revision of an endpoint that has a rollout, else the whole endpoint."""

    entry: EndpointEntry
    replicas: ReplicaSet
    engine: RoutedEngine
    server: Server
    metrics: CountedMetrics
    fell_back_s: float = -math.inf
    """The time of the last request that a hosted API answered because no replica could."""

    def adapted(self, model: str) -> Server:
        """Returns the server of the endpoint, or of its adapter that `model` names."""
        _, _, adapter = model.partition(ADAPTER_SEPARATOR)
        if not adapter:
            return self.server
        return self.server.with_adapter(model, adapter_id(adapter, self.entry.spec.adapters[adapter]))


class EndpointModels:
    """The models that a cluster serves. Each endpoint is a model with the endpoint's name. Use this object from one
    event loop."""

    def __init__(self, gateway: str, hosted: HostedApis | None = None) -> None:
        self._gateway, self._hosted = gateway, hosted or HostedApis({})
        self._listing: Listing = {}
        self._applications: dict[str, _Application] = {}
        self._tallies: dict[tuple[int, int], RevisionTally] = {}
        self._shadows = ShadowTraffic()
        self._unserved = ValueRecorder(REQUESTS)
        """Counts the requests that name no endpoint, which no endpoint's metrics include."""
        self._retired: list[ReplicaSet] = []
        """The replica sets of deleted endpoints, which finish their running requests."""
        self.listed = asyncio.Event()
        """Set once the endpoints have been read; before that, an unknown model may still exist."""

    def update(self, listing: Listing) -> None:
        """Updates the models to `listing`, which contains all endpoints that now exist and their replicas."""
        named = [(name, each) for name, entry in listing.items() for each in (entry, entry.challenger) if each]
        created = {each.spec.name: each.created_at_s for _, each in named}
        for name, old in list(self._applications.items()):
            if created.get(name) != old.entry.created_at_s:
                self._retire(self._applications.pop(name).replicas)
        for name, entry in named:
            known = self._applications.get(entry.spec.name)
            if known is None:
                known = self._applications[entry.spec.name] = self._made(name, entry)
            known.entry = entry
            known.replicas.router.slo_ttft_s = entry.spec.replicas.slo_ttft_s or math.inf
            known.replicas.most_waiting = entry.spec.max_ongoing * max(1, entry.spec.replicas.max)
            known.metrics.revision = str(entry.revision or "")
            known.metrics.slo_ttft_s = entry.spec.replicas.slo_ttft_s
            known.server.min_priority = entry.spec.min_request_priority
            if known.server.images.hosts != entry.spec.image_hosts:
                known.server.images = ImageFetcher(entry.spec.image_hosts)
            known.engine.answers.cache.set_policy(entry.spec.answer_cache)
            known.replicas.update(entry.replicas)
        self._listing = dict(listing)
        for entry in listing.values():
            self._join_rollout(entry)
        for each in self._applications.values():
            each.engine.prefill = self._prefill_pool(each.entry.spec)
        for key in list(self._tallies)[:-_MOST_TALLIES]:
            del self._tallies[key]
        self.listed.set()

    def _prefill_pool(self, spec: ServeSpec) -> PrefillPool | None:
        """Returns the replicas of the endpoint that computes prompts for this one, if one team has both."""
        entry = self._listing.get(spec.prefill.endpoint) if spec.prefill is not None else None
        if spec.prefill is None or entry is None or entry.spec.team != spec.team:
            return None
        return PrefillPool(self._applications[entry.spec.name].replicas, spec.prefill.min_tokens)

    def _join_rollout(self, entry: EndpointEntry) -> None:
        """Makes both revisions of a rollout count their requests. No request waits for a replica of the challenger: the
        champion answers instead."""
        champion, rollout = self._applications[entry.spec.name], entry.rollout
        champion.server.version = served_version(entry.spec.version, entry.revision)
        champion.engine.patience_s = COLD_START_S
        champion.metrics.tally = None
        if rollout is None or entry.challenger is None:
            return
        challenger = self._applications[entry.challenger.spec.name]
        challenger.server.version = served_version(entry.challenger.spec.version, entry.challenger.revision)
        challenger.engine.patience_s = 0.0
        for each, revision in ((champion, rollout.split.champion), (challenger, rollout.split.challenger)):
            key = (rollout.number, revision)
            tally = self._tallies.pop(key) if key in self._tallies else RevisionTally(*key)
            each.metrics.tally = self._tallies[key] = tally  # the last: those that run are kept
            each.metrics.slo_ttft_s = entry.spec.replicas.slo_ttft_s

    def counted(self) -> list[CountedRevision]:
        """Returns the request totals of each revision in running and recently ended rollouts."""
        return [tally.to_report() for tally in self._tallies.values()]

    async def answer(
        self, model: str, request: Request, body: BaseModel, respond: Callable[[Server], Awaitable[T]]
    ) -> T:
        """Returns the response to this request from the revision that the rollout chooses. If a challenger fails, the
        champion answers. If no replica can answer, the fallback API answers.

        If `respond` raises, another server may answer. `respond` may therefore raise only before it sends anything."""
        try:
            return await self._answer(model, request, body, respond)
        except Exception as error:
            self._count_failure(model, request, error)
            raise

    async def _answer(
        self, model: str, request: Request, body: BaseModel, respond: Callable[[Server], Awaitable[T]]
    ) -> T:
        self._check_path(model, request)
        found = self._serving(model)
        if found.entry.spec.backend is not None:
            return await self._hosted_answer(found, found.entry.spec.backend, model, request, body)
        fallback = fallback_of(found.entry.spec, model, request)
        if fallback is None:
            return await self._own_answer(model, request, body, respond)
        challenger = self._challenger(model, request, body) if found.server.is_described else None
        if found.replicas.ready or (challenger is not None and challenger.replicas.ready):
            token = GIVES_WAY.set(True)
            try:
                return await self._own_answer(model, request, body, respond)
            except Exception as error:
                if not is_for_fallback(error):
                    raise
            finally:
                GIVES_WAY.reset(token)
        found.fell_back_s = time.monotonic()
        return await self._hosted_answer(found, fallback, model, request, body)

    async def _hosted_answer(
        self, found: _Application, backend: HostedBackend, model: str, request: Request, body: BaseModel
    ) -> T:
        self._check_use(model, request)
        track, timeout_s = found.metrics.track(api_of(request.url.path)), getattr(body, "timeout", None)
        answer = self._hosted.answer(backend, model, request, track, timeout_s)
        return cast(T, await in_request(request, body, answer))

    def _count_failure(self, model: str, request: Request, error: Exception) -> None:
        """Counts a request that failed before an engine was called, because no server has counted it."""
        failure = to_api_error(error)
        if failure.is_counted:
            return
        api, code = api_of(request.url.path), failure.body.error.code or ""
        if endpoint_of_model(model) in self._listing:
            self._serving(endpoint_of_model(model)).metrics.count_outcome(api, outcome_of(error), code)
        else:
            self._unserved.add("", "", api, outcome_of(error), code)

    async def _own_answer(
        self, model: str, request: Request, body: BaseModel, respond: Callable[[Server], Awaitable[T]]
    ) -> T:
        await self.server(model, request, body)
        challenger = self._challenger(model, request, body)
        if challenger is None:
            return await self._champion_answer(model, request, body, self._with_copy(model, request, body, respond))
        tally = challenger.metrics.tally
        refusal: Exception | None = None
        if challenger.replicas.ready:
            try:
                return _marked(await respond(challenger.adapted(model)), request, challenger.entry.revision)
            except Exception as error:
                if not champion_may_answer(error):
                    raise
                refusal = error
        is_counted = refusal is not None and (is_overload(refusal) or to_api_error(refusal).status >= 500)
        response = await self._champion_answer(model, request, body, respond)
        if tally is not None and not is_counted:  # it had no replica, or refused what the champion answers
            tally.fail()
        return response

    async def _champion_answer(
        self, model: str, request: Request, body: BaseModel, respond: Callable[[Server], Awaitable[T]]
    ) -> T:
        """Returns the champion's response; if the champion was replaced meanwhile, the response of its successor."""
        while True:
            server = await self.server(model, request, body)
            champion = self._serving(model)
            try:
                return _marked(await respond(server), request, champion.entry.revision)
            except Exception:
                if endpoint_of_model(model) not in self._listing or self._serving(model) is champion:
                    raise

    def _with_copy(
        self, model: str, request: Request, body: BaseModel, respond: Callable[[Server], Awaitable[T]]
    ) -> Callable[[Server], Awaitable[T]]:
        """Returns `respond`. For a share of the requests in a shadow rollout, it returns a function that also sends a
        copy to the challenger."""
        entry = self._listing[endpoint_of_model(model)]
        if entry.rollout is None or entry.challenger is None or not isinstance(body, CompletionRequest | ChatRequest):
            return respond
        found = self._applications[entry.challenger.spec.name]
        tally = found.metrics.tally
        if not found.replicas.ready or not _has(entry.challenger, model) or tally is None:
            return respond
        if not entry.rollout.split.is_shadowed(uuid4().hex):
            return respond
        challenger, caller = found.adapted(model), caller_of(request.scope)
        return lambda server: respond(self._shadows.copied(server, challenger, body, caller, tally))

    async def server(self, model: str, request: Request, body: BaseModel | None = None) -> Server:
        """Returns the server of a model. If the endpoint has had no replica yet, and no hosted API can answer for it,
        the call waits for the first replica, but no longer than the request may wait."""
        self._check_path(model, request)
        found = self._serving(model)
        self._check_use(model, request)
        is_hosted = found.entry.spec.backend or fallback_of(found.entry.spec, model, request)
        if not (found.server.is_described or is_hosted):
            try:
                await in_request(request, body, found.replicas.wait_ready(COLD_START_S))
            except WaitTimeoutError as error:
                raise ApiError(503, str(error), type="server_error", code="overloaded") from error
        return found.adapted(model)

    def cards(self, request: Request) -> list[Model]:
        path = request.scope.get(ENDPOINT)
        if path is not None and path not in self._listing:
            raise invalid(f"There is no endpoint {path!r} here.", param=None, code="not_found", status=404)
        may_use = caller_of(request.scope).may_use
        models = [each for name in sorted(self._listing) if path in (None, name) for each in self._names(name)]
        return [self._serving(model).adapted(model).card(model) for model in models if may_use(model)]

    def count_refused_body(self, api: str) -> None:
        self._unserved.add("", "", api, "invalid", "")

    def endpoint(self, name: str) -> tuple[Server, ReplicaSet]:
        """Returns the server and the replicas of an endpoint. Raises ApiError for an unknown endpoint."""
        found = self._serving(name)
        return found.server, found.replicas

    def samples(self) -> Iterator[Sample]:
        """Yields the metrics of the requests that this process has handled."""
        yield from self._unserved.samples()
        for each in self._applications.values():
            yield from each.metrics.samples()

    async def endpoint_samples(self, request: Request) -> list[Sample]:
        """Returns the metrics of the endpoint in the request's path. If the path names none, returns the metrics of all
        endpoints. Endpoints that the caller may not use are left out. The metrics include the sums of the replicas'
        last reports."""
        name, may_use = request.scope.get(ENDPOINT), caller_of(request.scope).may_use
        if name is not None:
            self._serving(name)
        found: list[Sample] = []
        for each in list(self._applications.values()):
            if name in (None, each.server.model) and may_use(each.server.model):
                stats = await each.engine.stats()
                found += [*each.metrics.samples(), *engine_samples(stats, each.metrics.endpoint, each.metrics.revision)]
        return found

    async def report_queues(self, directory: Directory) -> None:
        """Reports how many requests of each endpoint wait for a replica, and repeats the report at intervals. The
        controller scales endpoints by these numbers. The task runs until it is cancelled."""
        reported: set[str] = set()
        while True:
            for name, found in self._applications.items():
                key = queue_key(name, self._gateway)
                queued = max(found.replicas.waiting, time.monotonic() - found.fell_back_s < _FELL_BACK_S)
                if queued:
                    report = {"at_s": time.time(), "queued": queued}
                    directory.report(key, json.dumps(report).encode())
                    reported.add(name)
                elif name in reported:
                    directory.report(key, None)
                    reported.discard(name)
            await asyncio.sleep(_REPORT_S)

    async def close(self) -> None:
        await self._shadows.close()
        for replicas in (*(found.replicas for found in self._applications.values()), *self._retired):
            await replicas.close()
        await self._hosted.close()

    def _retire(self, replicas: ReplicaSet) -> None:
        replicas.retire()
        self._retired = [*(each for each in self._retired if each.connected), replicas]

    def _challenger(self, model: str, request: Request, body: BaseModel) -> _Application | None:
        """Returns the challenger if it answers this request, has its adapter, and has been reached at least once."""
        entry, session = self._listing[endpoint_of_model(model)], session_of(body, request.headers)
        if entry.rollout is None or entry.challenger is None or not _has(entry.challenger, model):
            return None
        found = self._applications[entry.challenger.spec.name]
        is_chosen = found.server.is_described and is_for_challenger(entry.rollout, request.scope, session)
        return found if is_chosen else None

    def _serving(self, model: str) -> _Application:
        """Returns the application that serves an endpoint or an adapter of it. Raises ApiError for an unknown one."""
        entry = self._listing.get(endpoint_of_model(model))
        if entry is None or not _has(entry, model):
            message = f"The model {model!r} does not exist."
            raise invalid(message, param="model", code="model_not_found", status=404)
        return self._applications[entry.spec.name]

    def _names(self, name: str) -> tuple[str, ...]:
        """Returns the models of an endpoint: itself and its adapters."""
        return (name, *adapted_models(name, self._listing[name].spec))

    def _made(self, name: str, entry: EndpointEntry) -> _Application:
        replicas = ReplicaSet(name, on_info=lambda info: server.describe(info))
        metrics = CountedMetrics(name)
        quality = AnswerQuality()
        metrics.served_logprob = lambda: quality.mean_logprob
        engine = RoutedEngine(replicas, metrics.reused.add, metrics.resumed.add, quality)
        server = Server(engine, model=name)
        server.metrics = metrics
        return _Application(entry, replicas, engine, server, metrics)

    def _check_use(self, model: str, request: Request) -> None:
        """Refuses a model that the caller may not use."""
        if not caller_of(request.scope).may_use(model):
            message = f"This API key does not have access to model {model!r}."
            raise invalid(message, param="model", code="model_not_allowed", status=403)

    def _check_path(self, model: str, request: Request) -> None:
        """Refuses a model that is not the endpoint of the path."""
        path = request.scope.get(ENDPOINT)
        if path not in (None, endpoint_of_model(model)):
            raise invalid(
                f"The model {model!r} does not exist here; this address serves {path!r}.",
                param="model",
                code="model_not_found",
                status=404,
            )


def _marked(response: T, request: Request, revision: int) -> T:
    """Stores the revision that answered in the request, where the middleware that writes headers finds it."""
    if revision:
        request.scope[HEADERS] = {**request.scope.get(HEADERS, {}), "x-raytide-revision": str(revision)}
    return response


def endpoint_of_model(model: str) -> str:
    """Returns the name of the endpoint that serves a model. The model name is the endpoint's name, alone or followed by
    the name of one of its adapters."""
    return model.partition(ADAPTER_SEPARATOR)[0]


def _has(entry: EndpointEntry, model: str) -> bool:
    _, separator, adapter = model.partition(ADAPTER_SEPARATOR)
    return not separator or adapter in entry.spec.adapters
