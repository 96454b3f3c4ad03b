"""Anthropic's Messages API, by its official client in strict mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from pydantic import BaseModel

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.types import GenRequest
from raytide.actors.serving.protocols.messages_api.request import MessagesRequest, chat_request

Serve = Callable[..., str]
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = 'I look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def client_of(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120, _strict_response_validation=True)


@pytest.fixture
def client(serve: Serve) -> Anthropic:
    return client_of(serve(FakeEngine(reply="tide ", max_model_len=200)))


@pytest.fixture
def caller(serve: Serve) -> Anthropic:
    """A model that always answers with the same call."""
    return client_of(serve(FakeEngine(reply=CALL)))


def text_of(message: Any) -> str:
    (block,) = message.content
    assert block.type == "text"
    return str(block.text)


def test_an_answer_its_usage_and_its_request_id(client: Anthropic) -> None:
    answer = client.messages.create(model="fake", max_tokens=7, system="Be brief.", messages=HELLO)
    assert (text_of(answer), answer.stop_reason, answer.model) == ("tide ti", "max_tokens", "fake")
    assert answer.id.startswith("msg_")
    assert answer._request_id is not None and answer._request_id.startswith("req_")
    assert answer.usage.output_tokens == 7
    again = client.messages.create(model="fake", max_tokens=7, system="Be brief.", messages=HELLO).usage
    assert again.cache_read_input_tokens == answer.usage.input_tokens - 1  # the last token is always computed
    assert again.input_tokens == 1


def test_the_reason_of_the_end(client: Anthropic) -> None:
    stopped = client.messages.create(model="fake", max_tokens=50, messages=HELLO, stop_sequences=[*"zyxwvu", "de t"])
    assert (text_of(stopped), stopped.stop_reason, stopped.stop_sequence) == ("ti", "stop_sequence", "de t")
    full = client.messages.create(model="fake", max_tokens=1000, messages=HELLO)
    assert full.stop_reason == "model_context_window_exceeded"


def test_a_stream_is_the_same_answer_in_typed_events(client: Anthropic) -> None:
    ask: Any = {"model": "fake", "max_tokens": 50, "messages": HELLO, "stop_sequences": ["de t"]}
    events = [event.type for event in client.messages.create(stream=True, **ask)]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert {*events[2:-3]} == {"content_block_delta"}
    with client.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == "ti"
        final = stream.get_final_message()
    assert (text_of(final), final.stop_reason, final.stop_sequence) == ("ti", "stop_sequence", "de t")
    assert final.usage.output_tokens == 6


def test_numbers_of_a_call_that_json_does_not_have_are_null(serve: Serve) -> None:
    call = CALL.replace('"city": "Oslo"', '"t": [NaN, 1e999, 2.5]')
    client, ends = client_of(serve(FakeEngine(reply=call))), ["</tool_call>"]
    answer = client.messages.create(
        model="fake", max_tokens=len(call), messages=HELLO, tools=[TOOL], stop_sequences=ends
    )
    block: Any = answer.content[-1]
    assert (block.type, block.input) == ("tool_use", {"t": [None, None, 2.5]})


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_a_block_of_its_own(caller: Anthropic, stream: bool) -> None:
    ask: Any = {"model": "fake", "max_tokens": len(CALL) + 1, "messages": HELLO, "tools": [TOOL]}
    ask["stop_sequences"] = ["</tool_call>"]
    if stream:
        with caller.messages.stream(**ask) as events:
            answer: Any = events.get_final_message()
    else:
        answer = caller.messages.create(**ask)
    text, call = answer.content
    assert (text.text, call.type, call.name, call.input) == ("I look.", "tool_use", "weather", {"city": "Oslo"})
    assert call.id.startswith("toolu_")
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)


def test_a_call_that_is_cut_off_has_what_was_written_of_it(caller: Anthropic) -> None:
    written = CALL.index("slo") + 1
    answer: Any = caller.messages.create(model="fake", max_tokens=written, messages=HELLO, tools=[TOOL])
    assert (answer.content[1].input, answer.stop_reason) == ({"city": "Os"}, "max_tokens")
    ends_in_name = len(CALL) + CALL.index("weather")
    answer = caller.messages.create(model="fake", max_tokens=ends_in_name, messages=HELLO, tools=[TOOL])
    assert [block.type for block in answer.content] == ["text", "tool_use"]


def test_thinking_is_a_block_before_the_text(serve: Serve) -> None:
    class Thinker(FakeEngine):
        async def start(self) -> Any:
            info = await super().start()
            return type(info)(**{**{f: getattr(info, f) for f in info.__slots__}, "chat": type(info.chat)("", "open")})

    reply = "I weigh it.</think>Yes."
    client = client_of(serve(Thinker(reply=reply)))
    ask: Any = {"model": "fake", "max_tokens": len(reply), "messages": HELLO}
    whole: Any = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed: Any = stream.get_final_message()
    for answer in (whole, streamed):
        thinking, text = answer.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "I weigh it.", "Yes.")


def sent(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 2000, "messages": HELLO, **fields}
    return chat_request(MessagesRequest.model_validate(body)).model_dump(exclude_none=True)


def test_blocks_become_the_messages_of_a_chat() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see", "cache_control": {"type": "ephemeral"}}, image]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}, image]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}]
    chat = sent(messages=messages, system=system)
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "see"}, shown]},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": json.dumps({"city": "Oslo"})},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": [shown, {"type": "text", "text": "and now?"}]},
    ]
    assert "continue_final_message" not in chat


def test_fields_have_their_meaning_in_a_chat() -> None:
    prefilled = sent(messages=[*HELLO, {"role": "assistant", "content": "The answer is"}])
    assert prefilled["continue_final_message"] is True
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    forced = sent(tools=[TOOL], tool_choice=choice, thinking={"type": "disabled"}, metadata={"user_id": "ada"})
    assert forced["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert forced["parallel_tool_calls"] is False
    assert forced["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert forced["user"] == "ada"
    assert sent(tools=[TOOL], tool_choice={"type": "any"})["tool_choice"] == "required"
    config = {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    shaped = sent(output_config=config)
    assert shaped["reasoning_effort"] == "low"
    assert shaped["response_format"]["json_schema"]["schema_"] == {"type": "object"}


@pytest.mark.parametrize(
    ("extra", "status", "kind", "named"),
    [
        ({"model": "none"}, 404, "not_found_error", "none"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"extra_body": {"temperature": 3}}, 400, "invalid_request_error", "temperature"),
        ({"extra_body": {"colour": "blue"}}, 400, "invalid_request_error", "colour"),
        ({"extra_body": {"thread": {"type": "create"}}}, 400, "invalid_request_error", "thread"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"tools": [{"name": "no spaces!", "input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "invalid_request_error", "thinking.budget_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "invalid_request_error", "maximum context"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "file"}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0]",
        ),
    ],
)
def test_a_refusal_is_an_error_of_this_api(
    client: Anthropic, extra: dict[str, Any], status: int, kind: str, named: str
) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**{"model": "fake", "max_tokens": 3, "messages": HELLO, **extra})
    assert (caught.value.status_code, caught.value.type) == (status, kind)
    assert caught.value.api_message is not None and named in caught.value.api_message
    assert caught.value.body is not None and dict(caught.value.body)["request_id"] == caught.value.request_id  # type: ignore[call-overload]


def test_a_stream_that_fails_is_an_error_of_the_client(serve: Serve) -> None:
    class Dying(FakeEngine):
        def _admit(self, request: GenRequest) -> Any:
            live = super()._admit(request)
            live.voices[0]._limit = 3
            live.voices[0].next = lambda: (_ for _ in ()).throw(RuntimeError("gone"))
            return live

    client = client_of(serve(Dying()))
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(client.messages.create(model="fake", max_tokens=9, messages=HELLO, stream=True))
    assert caught.value.type == "api_error"


def test_tokens_are_counted_without_an_answer(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model="fake", messages=HELLO, system="Be brief.")
    answer = client.messages.create(model="fake", max_tokens=1, messages=HELLO, system="Be brief.")
    assert counted.input_tokens == answer.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError):
        client.messages.count_tokens(model="fake", messages=[{"role": "user", "content": "x" * 300}])


def test_models_are_listed_in_the_form_of_the_client_that_asks(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.max_input_tokens) == ("fake", 200)
    assert client.models.retrieve("fake").display_name == "fake"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("some/other")
    assert httpx.get(f"{str(client.base_url).rstrip('/')}/v1/models", timeout=60).json()["object"] == "list"


def test_an_answer_is_parsed_into_a_model_of_the_client(serve: Serve) -> None:
    class City(BaseModel):
        name: str

    reply = '{"name": "Oslo"}'
    engine = FakeEngine(reply=reply)
    client = client_of(serve(engine))
    with pytest.raises(anthropic.BadRequestError) as caught:  # the fake engine knows no grammars
        client.messages.parse(model="fake", max_tokens=len(reply), messages=HELLO, output_format=City)
    assert caught.value.api_message is not None and "output_config.format" in caught.value.api_message
