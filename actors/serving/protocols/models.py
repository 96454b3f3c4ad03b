"""The interface through which routes find the models that an app serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from fastapi import Request
from pydantic import BaseModel

from raytide.actors.serving.openai_api.admission import RequestCaller, caller_of
from raytide.actors.serving.openai_api.answers.bodies import Model
from raytide.actors.serving.openai_api.respond import failed
from raytide.actors.serving.openai_api.server import Server

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)


class Models(Protocol):
    """The models that an app serves: the model of one engine, or all endpoints of a cluster."""

    async def server(self, model: str, request: Request, body: BaseModel | None = None) -> Server:
        """Returns the server of a model. Raises ApiError if the model is unknown or the request's caller may not use
        it.
        """

    async def answer(
        self, model: str, request: Request, body: BaseModel, respond: Callable[[Server], Awaitable[T]]
    ) -> T:
        """Returns the result of `respond`, which is called with a server of the model. If one server fails, another
        server may be tried.
        """

    def cards(self, request: Request) -> list[Model]:
        """Returns the models that the request's caller may use."""

    def count_refused_body(self, api: str) -> None:
        """Counts a request that failed before its model was known, because its body was refused."""


class SingleModel:
    """The one model of a server whose engine runs in the same process."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def server(self, model: str, request: Request, body: BaseModel | None = None) -> Server:
        self._server.check_name(model)
        return self._server

    async def answer(
        self, model: str, request: Request, body: BaseModel, respond: Callable[[Server], Awaitable[T]]
    ) -> T:
        return await respond(await self.server(model, request))

    def cards(self, request: Request) -> list[Model]:
        return [self._server.card(self._server.model)]

    def count_refused_body(self, api: str) -> None:
        self._server.metrics.count_outcome(api, "invalid")


async def tracked(
    models: Models,
    api: str,
    model: str,
    body: B,
    request: Request,
    work: Callable[[Server, B, RequestCaller], Awaitable[T]],
) -> T:
    """Returns the result of `work`, which is called with a server of the model. Metrics count the request under the
    name `api`.
    """

    async def answer(server: Server) -> T:
        track = server.metrics.track(api)
        try:
            found = await work(server, body, caller_of(request.scope))
        except Exception as error:
            raise failed(error, track) from error
        track.finish("ok")
        return found

    return await models.answer(model, request, body, answer)
