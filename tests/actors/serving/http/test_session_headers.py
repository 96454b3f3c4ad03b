"""A request's session, which routers keep on one replica."""

from __future__ import annotations

from typing import Any

import pytest

from raytide.actors.serving.openai_api.respond import SESSION, session_of
from raytide.actors.serving.openai_api.wire import ChatRequest
from raytide.actors.serving.protocols.responses_api.request import ResponsesRequest, chat_request

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({}, {}, ""),
        ({}, {"user": "u"}, "u"),
        ({}, {"user": "u", "prompt_cache_key": "k"}, "k"),
        ({SESSION: "s"}, {"user": "u", "prompt_cache_key": "k"}, "s"),
        ({}, {"user": {"no": "text"}}, ""),
        ({SESSION: "s" * 5000}, {}, "s" * 1024),
    ],
)
def test_a_session_is_named_by_a_header_or_a_field(
    headers: dict[str, str], fields: dict[str, Any], session: str
) -> None:
    assert session_of(ChatRequest.model_validate(BODY | fields), headers) == session


def test_the_responses_api_names_sessions_too() -> None:
    body = ResponsesRequest.model_validate({"model": "m", "input": "hello", "prompt_cache_key": "k"})
    assert session_of(chat_request(body), {}) == "k"
