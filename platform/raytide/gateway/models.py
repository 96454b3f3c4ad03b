"""The endpoints of a cluster as models: which exist, and the server of each."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

from fastapi import Request

from raytide.actors.serving.metrics import render_all
from raytide.actors.serving.openai_api.admission import caller_of
from raytide.actors.serving.openai_api.errors import ApiError, invalid
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import Model
from raytide.actors.serving.ray_serve.keys import queue_key
from raytide.core.errors import WaitTimeoutError
from raytide.gateway.replicas.directory import Directory, EndpointEntry, Listing
from raytide.gateway.replicas.replica_set import ReplicaSet
from raytide.gateway.replicas.routed_engine import COLD_START_S, RoutedEngine

ENDPOINT = "raytide.endpoint"
"""The key of an ASGI scope with the endpoint that the path names, if it names one."""
_REPORT_S = 1.0


@dataclass(slots=True)
class _Endpoint:
    entry: EndpointEntry
    replicas: ReplicaSet
    engine: RoutedEngine
    server: Server


class EndpointModels:
    """Every endpoint of the cluster is a model of its name. Use it from one event loop."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._endpoints: dict[str, _Endpoint] = {}
        self._refused: dict[str, int] = {}
        self._retired: list[ReplicaSet] = []
        """Replicas of deleted endpoints, which finish their requests."""
        self.listed = asyncio.Event()
        """Set once the endpoints were read: before that, a model that is not known may exist."""

    def update(self, listing: Listing) -> None:
        """Takes over the endpoints and replicas that exist now."""
        for name, old in list(self._endpoints.items()):
            if name not in listing or listing[name].created_at_s != old.entry.created_at_s:
                self._retire(self._endpoints.pop(name).replicas)
        for name, entry in listing.items():
            known = self._endpoints.get(name)
            if known is None:
                known = self._endpoints[name] = self._made(name, entry)
            known.entry = entry
            known.replicas.most_waiting = entry.spec.max_ongoing * max(1, entry.spec.replicas.max)
            known.engine.answers.cache.set_policy(entry.spec.answer_cache)
            known.replicas.update(entry.replicas)
        self.listed.set()

    async def server(self, model: str, request: Request) -> Server:
        self._check_path(model, request)
        found = self._endpoints.get(model)
        if found is None:
            raise _unknown(model)
        if not caller_of(request.scope).may_use(model):
            message = f"This API key does not have access to model {model!r}."
            raise invalid(message, param="model", code="model_not_allowed", status=403)
        if not found.server.is_described:
            try:
                await found.replicas.wait_ready(COLD_START_S)
            except WaitTimeoutError as error:
                raise ApiError(503, str(error), type="server_error", code="overloaded") from error
        return found.server

    def cards(self, request: Request) -> list[Model]:
        path = request.scope.get(ENDPOINT)
        if path is not None and path not in self._endpoints:
            raise invalid(f"There is no endpoint {path!r} here.", param=None, code="not_found", status=404)
        may_use = caller_of(request.scope).may_use
        named = [(name, each) for name, each in sorted(self._endpoints.items()) if path in (None, name)]
        return [each.server.card(name) for name, each in named if may_use(name)]

    def count_refused_body(self, api: str) -> None:
        self._refused[api] = self._refused.get(api, 0) + 1

    def endpoint(self, name: str) -> tuple[Server, ReplicaSet]:
        """Returns the server and the replicas of an endpoint. Raises ApiError for an unknown one."""
        found = self._endpoints.get(name)
        if found is None:
            raise _unknown(name)
        return found.server, found.replicas

    async def metrics(self, name: str | None) -> bytes:
        """Returns the metrics of an endpoint, or of all, in Prometheus' text format."""
        servers = [self.endpoint(name)[0]] if name is not None else [each.server for each in self._endpoints.values()]
        return render_all([(server.metrics, await server.engine.stats()) for server in servers])

    async def report_queues(self, directory: Directory) -> None:
        """Reports the requests that wait for a replica, for as long as it runs; the controller scales by them."""
        reported: set[str] = set()
        while True:
            for name, found in self._endpoints.items():
                key = queue_key(name, self._gateway)
                if found.replicas.waiting:
                    report = {"at_s": time.time(), "queued": found.replicas.waiting}
                    directory.report(key, json.dumps(report).encode())
                    reported.add(name)
                elif name in reported:
                    directory.report(key, None)
                    reported.discard(name)
            await asyncio.sleep(_REPORT_S)

    async def close(self) -> None:
        for replicas in (*(found.replicas for found in self._endpoints.values()), *self._retired):
            await replicas.close()

    def _retire(self, replicas: ReplicaSet) -> None:
        replicas.retire()
        self._retired = [*(each for each in self._retired if each.connected), replicas]

    def _made(self, name: str, entry: EndpointEntry) -> _Endpoint:
        spec = entry.spec
        replicas = ReplicaSet(name, on_info=lambda info: server.describe(info))
        engine = RoutedEngine(replicas, on_reuse=lambda how: server.metrics.count_reuse(how))
        server = Server(
            engine,
            model=name,
            min_priority=spec.min_request_priority,
        )
        return _Endpoint(entry, replicas, engine, server)

    def _check_path(self, model: str, request: Request) -> None:
        """Refuses a model that is not the endpoint of the path."""
        path = request.scope.get(ENDPOINT)
        if path not in (None, model):
            raise invalid(
                f"The model {model!r} does not exist here; this address serves {path!r}.",
                param="model",
                code="model_not_found",
                status=404,
            )


def _unknown(model: str) -> ApiError:
    return invalid(f"The model {model!r} does not exist.", param="model", code="model_not_found", status=404)
