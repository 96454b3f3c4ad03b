"""Anthropic's official client in its strict mode: messages, streams, tools with its own loop, parsed output, counts."""

from typing import Literal

import anthropic
from anthropic import Anthropic, beta_tool
from features import URL, feature, raises, run
from pydantic import BaseModel

client = Anthropic(
    base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
)
HELLO = [{"role": "user", "content": "the tide comes in"}]
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Place(BaseModel, extra="forbid"):
    city: Literal["Oslo", "Rome"]
    wet: bool


@feature
def models_list_and_retrieve():
    assert [model.id for model in client.models.list()] == ["agent", "caller", "talker", "tiny"]
    assert client.models.retrieve("tiny").type == "model"
    assert raises(anthropic.NotFoundError, lambda: client.models.retrieve("none")).type == "not_found_error"


@feature
def messages_whole_and_streamed():
    ask = {"model": "tiny", "max_tokens": 8, "messages": HELLO, "system": "Be brief."}
    greedy = {"extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask, **greedy)
    with client.messages.stream(**ask, **greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    raw = client.messages.with_raw_response.create(**ask)
    assert raw.headers["request-id"] == raw.parse()._request_id


@feature
def stop_sequences():
    stopped = client.messages.create(model="talker", max_tokens=20, messages=HELLO, stop_sequences=["de"])
    found = stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence
    assert found == ("ti", "stop_sequence", "de")


@feature
def a_prefilled_turn_is_continued():
    messages = [*HELLO, {"role": "assistant", "content": "The answer is ("}]
    counted = client.messages.count_tokens(model="tiny", messages=messages)
    assert client.messages.create(model="tiny", max_tokens=4, messages=messages).content
    closed = [*messages, {"role": "user", "content": "B"}]
    assert counted.input_tokens < client.messages.count_tokens(model="tiny", messages=closed).input_tokens


@feature
def counted_tokens_are_those_of_the_usage():
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, tools=[WEATHER], system="Be brief.")
    usage = client.messages.create(
        model="tiny", max_tokens=1, messages=HELLO, tools=[WEATHER], system="Be brief."
    ).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@feature
def calls_that_are_forced_always_parse():
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = client.messages.create(
            model="tiny", max_tokens=200, messages=HELLO, tools=[WEATHER], tool_choice=choice
        )
        call = answer.content[-1]
        assert (call.type, answer.stop_reason) == ("tool_use", "tool_use")
        assert call.input["city"] in ("Oslo", "Rome")


@feature
def a_streamed_call():
    with client.messages.stream(
        model="caller", max_tokens=200, messages=HELLO, tools=[WEATHER], stop_sequences=["<END>"]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert (final.content[-1].input, final.stop_reason) == ({"city": "Oslo"}, "tool_use")


@feature
def the_clients_own_loop_of_tools():
    asked = []

    @beta_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "rain in Oslo"

    runner = client.beta.messages.tool_runner(model="agent", max_tokens=200, messages=HELLO, tools=[weather])
    final = runner.until_done()
    assert asked == ["Oslo"]
    assert final.content[0].text == "The tool says: rain in Oslo."


@feature
def parsed_output():
    answer = client.messages.parse(model="tiny", max_tokens=200, messages=HELLO, output_format=Place)
    assert isinstance(answer.parsed_output, Place)


@feature
def errors():
    ask = {"max_tokens": 4, "messages": HELLO}
    found = raises(anthropic.NotFoundError, lambda: client.messages.create(model="none", **ask))
    assert (found.type, found.error_code) == ("not_found_error", "model_not_found")
    wrong = raises(anthropic.BadRequestError, lambda: client.messages.create(model="tiny", **{**ask, "messages": []}))
    assert wrong.type == "invalid_request_error"
    assert wrong.request_id


run()
