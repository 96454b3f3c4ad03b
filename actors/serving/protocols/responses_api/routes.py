"""The routes of the Responses API."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from raytide.actors.serving.protocols.chat_api import ChatApi
from raytide.actors.serving.protocols.models import Models
from raytide.actors.serving.protocols.responses_api.request import ResponsesRequest, chat_request, in_responses
from raytide.actors.serving.protocols.responses_api.writer import ResponsesWriter

_API = ChatApi("responses", chat_request, in_responses)


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def add_responses_routes(app: FastAPI, models: Models) -> None:
    @app.post("/v1/responses", responses={200: {"content": {"text/event-stream": {}}}})
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await _API.answer(models, body.model, body, request, partial(ResponsesWriter, body))

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesRequest, request: Request) -> InputTokens:
        return InputTokens(input_tokens=await _API.count_tokens(models, "input_tokens", body.model, body, request))
