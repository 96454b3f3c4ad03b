"""The routes of Anthropic's Messages API, and its form of the list of models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError

from raytide.actors.serving.openai_api.admission import RequestCaller
from raytide.actors.serving.openai_api.answers.bodies import Model
from raytide.actors.serving.openai_api.errors import ApiError, validation_error
from raytide.actors.serving.openai_api.respond import respond
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import ChatRequest
from raytide.actors.serving.protocols.messages_api.errors import MessagesError
from raytide.actors.serving.protocols.messages_api.request import (
    MessagesRequest,
    PromptRequest,
    chat_request,
    in_messages,
)
from raytide.actors.serving.protocols.messages_api.writer import MessagesWriter
from raytide.actors.serving.protocols.models import Models, tracked

_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
_RESPONSES: dict[int | str, dict[str, Any]] = {status: {"model": MessagesError} for status in _ERRORS}


class CountedTokens(BaseModel):
    input_tokens: int


def add_messages_routes(app: FastAPI, models: Models) -> None:
    @app.post("/v1/messages", responses={**_RESPONSES, 200: {"content": {"text/event-stream": {}}}})
    async def messages(body: MessagesRequest, request: Request) -> Response:
        await models.server(body.model, request)  # an unknown model is the first problem to name
        chat = _chat_of(body)

        async def answer(server: Server) -> Response:
            try:
                return await respond(server, "messages", chat, request, partial(MessagesWriter, body))
            except ApiError as error:
                raise in_messages(error) from error

        return await models.answer(body.model, request, chat, answer)

    @app.post("/v1/messages/count_tokens", responses=_RESPONSES)
    async def count_tokens(body: PromptRequest, request: Request) -> CountedTokens:
        await models.server(body.model, request)

        async def work(server: Server, chat: ChatRequest, _: RequestCaller) -> CountedTokens:
            try:
                tokens = (await server.chat_prompt(chat)).tokens
                server.check_fits(tokens, "messages")
            except ApiError as error:
                raise in_messages(error) from error
            return CountedTokens(input_tokens=len(tokens))

        return await tracked(models, "count_tokens", body.model, _chat_of(body), request, work)


def model_page(cards: Sequence[Model]) -> dict[str, Any]:
    """Returns all models as one page."""
    data = [model_info(card) for card in cards]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": False, **ends}


def model_info(card: Model) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    }


def _chat_of(body: PromptRequest) -> ChatRequest:
    try:
        return chat_request(body)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise in_messages(validation_error(errors)) from error
