"""The official client, 2.x and 3.x, in its strict mode."""

import json
import time
from typing import Literal

import openai
from features import KEYS, URL, feature, raises, run
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True)
loose = OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
"""Strict mode refuses OpenAI's own streams of completions, whose finish reason is null at first, and base64."""
HELLO = [{"role": "user", "content": "the tide comes in"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
CALLED = {"model": "caller", "messages": HELLO, "tools": TOOLS, "stop": ["<END>"]}


class Place(BaseModel, extra="forbid"):
    city: str = Field(pattern="^[a-z]{2,8}$")
    degrees: int = Field(ge=-40, le=50)
    wet: bool


class Weather(BaseModel, extra="forbid"):
    city: Literal["Oslo", "Rome"]


def arguments(answer):
    return [(call.function.name, json.loads(call.function.arguments)) for call in answer.choices[0].message.tool_calls]


@feature
def models_list_and_retrieve():
    assert [model.id for model in client.models.list()] == ["agent", "caller", "talker", "tiny"]
    assert client.models.retrieve("tiny").object == "model"
    assert raises(openai.NotFoundError, lambda: client.models.retrieve("none")).code == "model_not_found"


@feature
def chat():
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=8, temperature=0)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@feature
def chat_stream_with_usage():
    parts = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens <= 8
    assert len({part.id for part in parts}) == 1


@feature
def choices_seed_and_stop():
    ask = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "n": 3, "seed": 3, "temperature": 0.8}
    one, two = (client.chat.completions.create(**ask) for _ in range(2))
    assert [each.message.content for each in one.choices] == [each.message.content for each in two.choices]
    stopped = client.chat.completions.create(model="talker", messages=HELLO, stop=["de"], max_tokens=20)
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("ti", "stop")


@feature
def log_probabilities():
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3)
    assert all(len(each.top_logprobs) >= 3 for each in answer.choices[0].logprobs.content)


@feature
def completions_of_texts_and_token_ids():
    for prompt in ("tide", ["a", "b"], [5, 6, 7], [[5, 6], [7]]):
        assert client.completions.create(model="tiny", prompt=prompt, max_tokens=3).usage.completion_tokens
    parts = list(loose.completions.create(model="tiny", prompt="tide", max_tokens=5, stream=True, logprobs=2))
    assert parts[-1].choices[0].finish_reason


@feature
def embeddings():
    floats = client.embeddings.create(model="tiny", input=["a", "b"], encoding_format="float").data
    packed = loose.embeddings.create(model="tiny", input=["a", "b"]).data
    assert len(floats) == len(packed) == 2
    assert max(abs(a - b) for a, b in zip(floats[1].embedding, packed[1].embedding, strict=True)) < 1e-6


@feature
def json_schema_and_json_object():
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Place, max_tokens=100)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    whole = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=90,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": Place.model_json_schema()}},
    )
    Place.model_validate_json(whole.choices[0].message.content)
    client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20, response_format={"type": "json_object"})


@feature
def tools_auto():
    answer = client.chat.completions.create(**CALLED)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert arguments(answer) == [("weather", {"city": "Oslo"})]


@feature
def tools_streamed():
    with client.chat.completions.stream(**CALLED) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert arguments(final) == [("weather", {"city": "Oslo"})]


@feature
def tools_none_required_and_named():
    ask = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "max_tokens": 200}
    assert client.chat.completions.create(**ask | {"max_tokens": 5}, tool_choice="none").choices[0].message.content
    answer = client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    ((name, found),) = arguments(answer)
    assert name == "weather"
    assert found["city"] in ("Oslo", "Rome")
    answer = client.chat.completions.create(**ask, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert answer.choices[0].finish_reason == "stop"
    assert len(arguments(answer)) == 1


@feature
def tools_beside_a_format():
    """The answer is a call or a Place, as the random weights will."""
    tools = [openai.pydantic_function_tool(Weather)]
    for _ in range(4):
        answer = client.chat.completions.parse(
            model="tiny", messages=HELLO, tools=tools, response_format=Place, max_tokens=200, parallel_tool_calls=False
        )
        (choice,) = answer.choices
        calls = [call.function.parsed_arguments for call in choice.message.tool_calls or ()]
        assert isinstance(calls[0] if calls else choice.message.parsed, Weather if calls else Place)
    ask = {"model": "tiny", "input": "hello", "text_format": Place, "max_output_tokens": 200}
    tool = {"type": "function", "strict": True, **TOOLS[0]["function"]}
    answer = client.responses.parse(**ask, tools=[tool], parallel_tool_calls=False)
    assert isinstance(answer.output_parsed, Place) or answer.output[0].type == "function_call"


@feature
def tool_results_in_the_history():
    answer = client.chat.completions.create(**CALLED)
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    turns = [*HELLO, message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(model="talker", messages=turns, max_tokens=4).choices[0].message.content


@feature
def responses():
    answer = client.responses.create(model="talker", input="hello", max_output_tokens=8)
    assert answer.output_text == "tide tid"
    with client.responses.stream(model="talker", input="hello", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
        assert stream.until_done()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"
    with client.responses.stream(model="tiny", input="hello", text_format=Place, max_output_tokens=200) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, Place)
    assert "response.output_text.delta" in kinds


@feature
def stored_responses():
    first = client.responses.create(model="talker", input="hello", max_output_tokens=8)
    with client.responses.stream(
        model="talker", input="more", previous_response_id=first.id, max_output_tokens=8
    ) as stream:
        last = list(stream)[-1].response
    assert client.responses.retrieve(last.id).output_text == last.output_text == "tide tid"
    assert last.usage.input_tokens > first.usage.input_tokens
    assert [item.role for item in client.responses.input_items.list(last.id)] == ["user", "assistant", "user"]
    client.responses.delete(first.id)
    assert raises(openai.NotFoundError, lambda: client.responses.retrieve(first.id))
    client.responses.create(model="talker", input="x", previous_response_id=last.id, max_output_tokens=1)


@feature
def responses_with_tools_and_formats():
    tool = {"type": "function", "strict": True, **TOOLS[0]["function"]}
    answer = client.responses.create(
        model="tiny", input="hello", tools=[tool], tool_choice="required", max_output_tokens=200,
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = [each for each in answer.output if each.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    turns = [
        {"role": "user", "content": "hello"},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    assert client.responses.create(model="talker", input=turns, max_output_tokens=4).output_text == "tide"
    parsed = client.responses.parse(model="tiny", input="hello", text_format=Place, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Place)


@feature
def files_and_batches():
    lines = [
        {
            "custom_id": f"row-{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "talker", "prompt": "x"},
        }
        for n in range(3)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    until_s = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < until_s, batch
        time.sleep(0.1)
    rows = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [row["custom_id"] for row in rows] == ["row-0", "row-1", "row-2"]
    assert rows[0]["response"]["body"]["choices"][0]["text"].startswith("tide")
    assert batch.id in [each.id for each in client.batches.list()]
    assert client.files.delete(file.id).deleted


@feature
def errors_and_headers():
    error = raises(
        openai.BadRequestError, lambda: client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
    )
    assert (error.param, error.type) == ("temperature", "invalid_request_error")
    error = raises(
        openai.BadRequestError, lambda: client.completions.create(model="tiny", prompt="x " * 5000, max_tokens=1)
    )
    assert error.code == "context_length_exceeded"
    assert raises(openai.NotFoundError, lambda: client.completions.create(model="no", prompt="x")).param == "model"
    raw = client.chat.completions.with_raw_response.create(model="talker", messages=HELLO, max_tokens=1)
    assert raw.headers["x-request-id"]
    assert raw.headers["openai-processing-ms"]
    assert raw.headers["x-raytide-replica"]


def holder_of(key, **options):
    return OpenAI(base_url=URL, api_key=KEYS[key], timeout=60, _strict_response_validation=True, **options)


TALK = {"model": "talker", "messages": HELLO, "max_tokens": 4}


@feature
def a_key_with_limits_of_a_team():
    """The key has three requests a minute, and another client may have used some of them."""
    limited = holder_of("limited", max_retries=0)
    left, refused = 3, None
    while refused is None:
        try:
            raw = limited.chat.completions.with_raw_response.create(**TALK)
        except openai.RateLimitError as error:
            refused = error
            continue
        assert raw.headers["x-ratelimit-limit-requests"] == "3"
        assert raw.headers["x-ratelimit-limit-tokens"] == "10000"
        assert int(raw.headers["x-ratelimit-remaining-requests"]) < left
        assert 0 < int(raw.headers["x-ratelimit-remaining-tokens"]) < 10_000
        assert raw.headers["x-ratelimit-reset-requests"].endswith("s")
        assert float(raw.headers["x-raytide-cost-usd"]) > 0
        left = int(raw.headers["x-ratelimit-remaining-requests"])
    assert (refused.type, refused.code) == ("requests", "rate_limit_exceeded")
    assert refused.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert float(refused.response.headers["retry-after"]) > 0


@feature
def a_key_without_quota():
    """It is no use to try again, so the client does not."""
    sent = []  # its own retries among them
    http = openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})
    poor = holder_of("poor", max_retries=4, http_client=http)
    error = raises(openai.RateLimitError, lambda: poor.chat.completions.create(**TALK | {"max_tokens": 4000}))
    assert (error.type, error.code) == ("insufficient_quota", "insufficient_quota")
    assert error.response.headers["x-should-retry"] == "false"
    assert len(sent) == 1
    error = raises(
        openai.RateLimitError, lambda: list(poor.chat.completions.create(**TALK | {"max_tokens": 4000}, stream=True))
    )
    assert error.code == "insufficient_quota"
    assert poor.chat.completions.create(**TALK | {"max_tokens": 1}).choices


@feature
def a_key_for_one_model_and_a_wrong_key():
    scoped = holder_of("scoped", max_retries=0)
    assert [model.id for model in scoped.models.list()] == ["talker"]
    assert scoped.chat.completions.create(**TALK).choices
    error = raises(openai.PermissionDeniedError, lambda: scoped.chat.completions.create(**TALK | {"model": "tiny"}))
    assert (error.code, error.param) == ("model_not_allowed", "model")
    wrong = OpenAI(base_url=URL, api_key="rk-" + "x" * 43, max_retries=0)
    error = raises(openai.AuthenticationError, lambda: wrong.chat.completions.create(**TALK))
    assert error.code == "invalid_api_key"
    assert "x" * 43 not in str(error)


@feature
def a_client_that_leaves():
    with client.chat.completions.create(model="talker", messages=HELLO, max_tokens=2000, stream=True) as stream:
        next(iter(stream))
    assert client.chat.completions.create(model="talker", messages=HELLO, max_tokens=1).choices


run()
