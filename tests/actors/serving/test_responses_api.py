"""The Responses API, by the official client in strict mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI

from raytide.actors.engine.backends.fake import FakeEngine

Serve = Callable[..., str]
ClientOf = Callable[[str], OpenAI]
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = 'I look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def client(serve: Serve, client_of: ClientOf) -> OpenAI:
    return client_of(serve(FakeEngine(reply="tide ", max_model_len=2000)))


@pytest.fixture
def caller(serve: Serve, client_of: ClientOf) -> OpenAI:
    """A model that always answers with the same call."""
    return client_of(serve(FakeEngine(reply=CALL)))


def test_an_answer_and_its_usage(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hello", instructions="Be brief.", max_output_tokens=7)
    assert answer.output_text == "tide ti"
    assert (answer.status, answer.instructions) == ("incomplete", "Be brief.")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 7
    assert answer.usage.total_tokens == answer.usage.input_tokens + 7


def streamed(client: OpenAI, **ask: Any) -> tuple[list[str], Any]:
    """The types of the events, and the response of the last one."""
    events: list[Any] = list(client.responses.create(stream=True, **ask))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return [event.type for event in events], events[-1].response


def test_a_stream_is_the_same_answer_in_typed_events(client: OpenAI) -> None:
    events, final = streamed(client, model="fake", input="hello", max_output_tokens=7)
    assert events[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert final.output_text == "tide ti"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_an_item_of_its_own(caller: OpenAI, stream: bool) -> None:
    ask: Any = {"model": "fake", "input": "?", "tools": [TOOL], "max_output_tokens": len(CALL)}
    if stream:
        kinds, answer = streamed(caller, **ask)
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= {*kinds}
    else:
        answer = caller.responses.create(**ask)
    message, call = answer.output
    assert message.type == "message" and answer.output_text == "I look."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})


def test_the_history_of_calls_is_sent_back(client: OpenAI) -> None:
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ]
    assert client.responses.create(model="fake", input=history, tools=[TOOL], max_output_tokens=4).output_text == "tide"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"extra_body": {"colour": "blue"}}, "colour"),
        ({"input": [{"type": "input_image"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}, {"type": "y"}]}]},
            "input[0].content[1]",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "function", "name": "no spaces!"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(client: OpenAI, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "fake", "input": "x", **extra})
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)


def test_fields_that_ask_for_nothing_are_accepted(client: OpenAI) -> None:
    extra: Any = {"store": False, "metadata": {"a": "b"}, "truncation": "disabled", "previous_response_id": None}
    answer = client.responses.create(model="fake", input="x", max_output_tokens=1, **extra)
    assert answer.metadata == {"a": "b"}
