"""The routes of the Responses API."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError

from raytide.actors.serving.openai_api.admission import RequestCaller
from raytide.actors.serving.openai_api.errors import ApiError, validation_error
from raytide.actors.serving.openai_api.respond import respond
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import ChatRequest
from raytide.actors.serving.protocols.models import Models, tracked
from raytide.actors.serving.protocols.responses_api.request import ResponsesRequest, chat_request, in_responses
from raytide.actors.serving.protocols.responses_api.writer import ResponsesWriter


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def add_responses_routes(app: FastAPI, models: Models) -> None:
    @app.post("/v1/responses", responses={200: {"content": {"text/event-stream": {}}}})
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        await models.server(body.model, request)  # an unknown model is the first problem to name
        chat = _chat_of(body)

        async def answer(server: Server) -> Response:
            try:
                return await respond(server, "responses", chat, request, partial(ResponsesWriter, body))
            except ApiError as error:
                raise in_responses(error) from error

        return await models.answer(body.model, request, chat, answer)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesRequest, request: Request) -> InputTokens:
        await models.server(body.model, request)

        async def work(server: Server, chat: ChatRequest, _: RequestCaller) -> InputTokens:
            try:
                tokens = (await server.chat_prompt(chat)).tokens
                server.check_fits(tokens, "messages")
            except ApiError as error:
                raise in_responses(error) from error
            return InputTokens(input_tokens=len(tokens))

        return await tracked(models, "input_tokens", body.model, _chat_of(body), request, work)


def _chat_of(body: ResponsesRequest) -> ChatRequest:
    try:
        return chat_request(body)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise in_responses(validation_error(errors)) from error
