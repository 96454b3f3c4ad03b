"""The routes of the Responses API."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel
from starlette.convertors import StringConvertor, register_url_convertor

from raytide.actors.engine.limits import MAX_NAME_CHARS
from raytide.actors.serving.openai_api.admission import caller_of
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.generation import GenerationStream
from raytide.actors.serving.protocols.chat_api import ChatApi
from raytide.actors.serving.protocols.models import Models
from raytide.actors.serving.protocols.responses_api.request import ResponsesRequest, chat_request, in_responses
from raytide.actors.serving.protocols.responses_api.stored import (
    MAX_REFERRED,
    MAX_RESPONSE_BYTES,
    PASSED_ON,
    RESPONSE_ID,
    PassedOn,
    ResponseOwner,
    ResponseStore,
    StoredResponse,
    foreign_items,
    input_items,
    response_of,
)
from raytide.actors.serving.protocols.responses_api.writer import ResponsesWriter
from raytide.core.errors import RaytideError

_log = logging.getLogger(__name__)


class _ResponseId(StringConvertor):
    """A response's id in a path. The segment `input_tokens`, which belongs to another route, is no id."""

    regex = r"(?!input_tokens(?:/|$))[^/]+"


register_url_convertor("response_id", _ResponseId())
_API = ChatApi("responses", chat_request, in_responses)


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItems(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


def add_responses_routes(app: FastAPI, models: Models, store: ResponseStore) -> None:
    @app.post("/v1/responses", responses={200: {"content": {"text/event-stream": {}}}})
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        asked, writers = await _continued(body, request), list[ResponsesWriter]()

        def writer_of(generation: GenerationStream) -> ResponsesWriter:
            writers.append(ResponsesWriter(body, generation))
            return writers[-1]

        async def keep_response(response: dict[str, Any]) -> None:
            caller = caller_of(request.scope)
            stored = StoredResponse(response["id"], body.model, response, input_items(asked.input))
            try:
                await store.add(ResponseOwner(caller.team, caller.account), stored)
            except RaytideError as error:  # the answer is there; what follows it gets a 400 that says that it is not
                _log.warning("response %s is not stored: %s", stored.id, error)

        async def keep() -> None:
            response = writers[-1].response
            assert response is not None
            await keep_response(response)

        is_kept, is_continued = body.store is not False, asked is not body
        whole = foreign_items(asked.input) if is_continued else None
        request.scope[PASSED_ON] = PassedOn(whole, keep_response if is_kept else None)
        return await _API.answer(models, body.model, asked, request, writer_of, keep if is_kept else None)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesRequest, request: Request) -> InputTokens:
        asked = await _continued(body, request)
        return InputTokens(input_tokens=await _API.count_tokens(models, "input_tokens", body.model, asked, request))

    @app.get("/v1/responses/{response_id:response_id}")
    async def retrieve_response(
        response_id: str, request: Request, stream: Annotated[bool, Query(include_in_schema=False)] = False
    ) -> dict[str, Any]:
        if stream:
            raise invalid("stream: a stored response comes in one piece.", param="stream")
        return (await _found(response_id, request)).response

    @app.delete("/v1/responses/{response_id:response_id}")
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        await _found(response_id, request)
        await store.delete(caller_of(request.scope).team, response_id)
        return DeletedResponse(id=response_id)

    @app.get("/v1/responses/{response_id:response_id}/input_items")
    async def list_input_items(
        response_id: str,
        request: Request,
        after: Annotated[str | None, Query(max_length=MAX_NAME_CHARS)] = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> InputItems:
        items = (await _found(response_id, request)).input
        items = items if order == "asc" else items[::-1]
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise invalid(f"There is no item {after!r} after which to list.", param="after", status=404)
            items = items[places[0] + 1 :]
        data = items[:limit]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return InputItems(data=data, first_id=first, last_id=last, has_more=len(items) > limit)

    async def _stored(response_id: str, request: Request) -> StoredResponse | None:
        """Returns a stored response of the caller's team, if the caller may use the response's model; else None."""
        caller = caller_of(request.scope)
        if not RESPONSE_ID.fullmatch(response_id):
            return None
        found = await store.get(caller.team, response_id)
        return found if found is not None and caller.may_use(found.model) else None

    async def _found(response_id: str, request: Request) -> StoredResponse:
        found = await _stored(response_id, request)
        if found is None:
            raise invalid(f"Response with id {response_id!r} not found.", param="response_id", status=404)
        return found

    async def _with_items(body: ResponsesRequest, request: Request) -> ResponsesRequest:
        """Returns the request with each item reference replaced by the item of a stored response."""
        if isinstance(body.input, str) or not any(item.get("type") == "item_reference" for item in body.input):
            return body
        await models.server(body.model, request)  # an unknown model is the first problem to name
        items: list[dict[str, Any]] = []
        known: dict[str, dict[str, tuple[dict[str, Any], int]]] = {}  # each item with its size
        size = 0
        for item in body.input:
            if item.get("type") != "item_reference":
                items.append(item)
                continue
            response_id, own = response_of(item.get("id")), str(item.get("id"))
            if response_id not in known:
                if len(known) == MAX_REFERRED:
                    message = f"input refers to items of more than {MAX_REFERRED} responses: send the items."
                    raise invalid(message, param="input")
                found = await _stored(response_id, request)
                output = () if found is None else found.response["output"]
                known[response_id] = {each["id"]: (each, len(json.dumps(each))) for each in output if "id" in each}
            if own not in known[response_id]:
                raise invalid(f"Item with id {own!r} not found.", param="input", status=404)
            referred, chars = known[response_id][own]
            size += chars
            if size > MAX_RESPONSE_BYTES:
                raise invalid("the items that input names are together too large: name fewer.", param="input")
            items.append(referred)
        return body.model_copy(update={"input": items})

    async def _continued(body: ResponsesRequest, request: Request) -> ResponsesRequest:
        """Returns the request with its item references resolved, and with the items of its previous response, if any,
        put before its own items.
        """
        body = await _with_items(body, request)
        if body.previous_response_id is None:
            return body
        await models.server(body.model, request)  # an unknown model is the first problem to name
        found = await _stored(body.previous_response_id, request)
        if found is None:
            raise invalid(
                f"Previous response with id {body.previous_response_id!r} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return body.model_copy(update={"input": [*found.conversation, *input_items(body.input)]})
