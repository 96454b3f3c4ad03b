"""The routes of Anthropic's Messages API, and the list of models in Anthropic's format."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from raytide.actors.serving.openai_api.answers.bodies import Model
from raytide.actors.serving.protocols.chat_api import ChatApi
from raytide.actors.serving.protocols.messages_api.errors import MessagesError
from raytide.actors.serving.protocols.messages_api.request import (
    MessagesRequest,
    PromptRequest,
    chat_request,
    in_messages,
)
from raytide.actors.serving.protocols.messages_api.writer import MessagesWriter
from raytide.actors.serving.protocols.models import Models

_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
_RESPONSES: dict[int | str, dict[str, Any]] = {status: {"model": MessagesError} for status in _ERRORS}
_API: ChatApi[PromptRequest] = ChatApi("messages", chat_request, in_messages)


class CountedTokens(BaseModel):
    input_tokens: int


def add_messages_routes(app: FastAPI, models: Models) -> None:
    @app.post("/v1/messages", responses={**_RESPONSES, 200: {"content": {"text/event-stream": {}}}})
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await _API.answer(models, body.model, body, request, partial(MessagesWriter, body))

    @app.post("/v1/messages/count_tokens", responses=_RESPONSES)
    async def count_tokens(body: PromptRequest, request: Request) -> CountedTokens:
        return CountedTokens(input_tokens=await _API.count_tokens(models, "count_tokens", body.model, body, request))


def model_page(cards: Sequence[Model]) -> dict[str, Any]:
    """Returns all models as one page of Anthropic's paged list."""
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
