"""Answers requests to the APIs that translate each request into a chat request. Also counts the tokens of a request's
prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError

from raytide.actors.serving.openai_api.admission import RequestCaller
from raytide.actors.serving.openai_api.answers.writer import ResponseWriter
from raytide.actors.serving.openai_api.errors import ApiError, validation_error
from raytide.actors.serving.openai_api.generation import GenerationStream
from raytide.actors.serving.openai_api.respond import respond
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import ChatRequest
from raytide.actors.serving.protocols.models import Models, tracked

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ChatApi(Generic[B]):
    """An API whose requests are translated into chat requests. `renamed` is a function that takes the error of a chat
    request and replaces the field names in it by this API's own names.
    """

    name: str
    chat_request: Callable[[B], ChatRequest]
    renamed: Callable[[ApiError], ApiError]

    async def answer(
        self,
        models: Models,
        model: str,
        body: B,
        request: Request,
        writer_of: Callable[[GenerationStream], ResponseWriter],
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> Response:
        """Returns the response to a request. `writer_of` and `keep` have the same meaning as in `respond`."""
        await models.server(model, request, body)  # an unknown model is the first problem to name
        chat = self._chat_of(body)

        async def answered(server: Server) -> Response:
            try:
                return await respond(server, self.name, chat, request, writer_of, keep)
            except ApiError as error:
                raise self.renamed(error) from error.__cause__  # by which another server's turn is decided

        return await models.answer(model, request, chat, answered)

    async def count_tokens(self, models: Models, api: str, model: str, body: B, request: Request) -> int:
        """Returns the number of tokens of a request's prompt. Metrics count the request under `api`."""
        await models.server(model, request)

        async def counted(server: Server, chat: ChatRequest, _: RequestCaller) -> int:
            try:
                tokens = (await server.chat_prompt(chat)).tokens
                server.check_fits(tokens, "messages")
            except ApiError as error:
                raise self.renamed(error) from error
            return len(tokens)

        return await tracked(models, api, model, self._chat_of(body), request, counted)

    def _chat_of(self, body: B) -> ChatRequest:
        try:
            return self.chat_request(body)
        except ValidationError as error:
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise self.renamed(validation_error(errors)) from error
