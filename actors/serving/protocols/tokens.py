"""The routes `/tokenize` and `/detokenize`, as in vLLM. They return the tokens of a text or a chat, and the text of
tokens.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from raytide.actors.engine.limits import MAX_MESSAGES, MAX_TEMPLATE_KWARGS, MAX_TOOLS
from raytide.actors.serving.openai_api.admission import RequestCaller
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.params import refuse_unknown
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import ChatMessage, ChatRequest, Name, Tokens, Tool, only_these
from raytide.actors.serving.protocols.models import Models, tracked


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, json_schema_extra=only_these(frozenset()))

    model: Name | None = None


class TokenizeRequest(_Request):
    """A text in `prompt`, or a chat in `messages` with the fields that determine the chat's prompt.

    If `add_special_tokens` is false, a text gets no special tokens. Otherwise it gets the tokenizer's special
    tokens, such as a BOS. A chat has only the special tokens of its template.
    """

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=MAX_TEMPLATE_KWARGS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class TokenizedText(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(_Request):
    tokens: Tokens


class DetokenizedText(BaseModel):
    prompt: str


_CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


def add_token_routes(app: FastAPI, models: Models) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizedText:
        return await tracked(models, "tokenize", _model(models, body, request), body, request, tokenized)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizedText:
        return await tracked(models, "detokenize", _model(models, body, request), body, request, _detokenized)


def _model(models: Models, body: _Request, request: Request) -> str:
    """Returns the model that a request names, or else the only one. Raises ApiError unless there is exactly one."""
    if body.model is not None:
        return body.model
    cards = models.cards(request)
    if len(cards) != 1:
        raise invalid("model is missing, and there is more than one.", param="model")
    return cards[0].id


async def tokenized(server: Server, body: TokenizeRequest, _: RequestCaller) -> TokenizedText:
    """Returns the tokens of the request's text or chat. Raises ApiError if the tokens exceed the context."""
    refuse_unknown(body)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages.", param="prompt")
    if body.messages is not None:
        tokens, field = await _chat_tokens(server, body), "messages"
    else:
        for name in _CHAT_ONLY:
            if getattr(body, name) is not None:
                raise invalid(f"{name} goes with messages, not with a prompt.", param=name)
        tokens = await server.engine.tokenize(body.prompt or "", special=body.add_special_tokens is not False)
        field = "prompt"
    server.check_fits(tokens, field)
    return TokenizedText(
        count=len(tokens),
        max_model_len=server.info.max_model_len,
        tokens=tokens,
        token_strs=await server.engine.pieces(tokens) if body.return_token_strs else None,
    )


async def _chat_tokens(server: Server, body: TokenizeRequest) -> list[int]:
    if body.add_special_tokens:
        raise invalid("add_special_tokens: a chat has the special tokens of its template.", param="add_special_tokens")
    fields = {name: getattr(body, name) for name in ("messages", *_CHAT_ONLY) if getattr(body, name) is not None}
    return (await server.chat_prompt(ChatRequest(model=server.model, **fields))).tokens


async def _detokenized(server: Server, body: DetokenizeRequest, _: RequestCaller) -> DetokenizedText:
    refuse_unknown(body)
    (text,) = await server.engine.decode([body.tokens])
    return DetokenizedText(prompt=text)
