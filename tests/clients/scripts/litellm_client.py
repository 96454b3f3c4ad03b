"""LiteLLM: its SDK and its router."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import asyncio
import json

import litellm
from features import URL, feature, raises, run

AT = {"api_base": URL, "api_key": "none", "max_retries": 0}
HELLO = [{"role": "user", "content": "the tide comes in"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


@feature
def completion():
    answer = litellm.completion(model="openai/tiny", messages=HELLO, max_tokens=6, **AT)
    assert answer.usage.completion_tokens <= 6


@feature
def stream_with_usage():
    parts = list(
        litellm.completion(
            model="openai/talker",
            messages=HELLO,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            **AT,
        )
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "tide tid"
    assert litellm.stream_chunk_builder(parts).usage.completion_tokens == 8


@feature
def asynchronous():
    answer = asyncio.run(litellm.acompletion(model="openai/talker", messages=HELLO, max_tokens=4, **AT))
    assert answer.choices[0].message.content == "tide"


@feature
def text_completion():
    answer = litellm.text_completion(model="text-completion-openai/talker", prompt="x", max_tokens=4, **AT)
    assert answer.choices[0].text == "tide"


@feature
def embedding():
    answer = litellm.embedding(model="openai/tiny", input=["a", "b"], encoding_format="float", **AT)
    assert len(answer.data) == 2


@feature
def tools():
    answer = litellm.completion(model="openai/caller", messages=HELLO, tools=TOOLS, stop=["<END>"], **AT)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert answer.choices[0].finish_reason == "tool_calls"


@feature
def tools_streamed():
    parts = list(
        litellm.completion(model="openai/caller", messages=HELLO, tools=TOOLS, stop=["<END>"], stream=True, **AT)
    )
    whole = litellm.stream_chunk_builder(parts)
    assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments) == {"city": "Oslo"}


@feature
def tools_required():
    answer = litellm.completion(
        model="openai/tiny",
        messages=HELLO,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        **AT,
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")


@feature
def response_format():
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(model="openai/tiny", messages=HELLO, response_format=wanted, max_tokens=50, **AT)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Oslo", "Rome")


@feature
def responses():
    answer = litellm.responses(model="openai/talker", input="hello", max_output_tokens=16, **AT)
    assert answer.output[0].content[0].text == "tide tide tide t"


@feature
def errors():
    raises(litellm.NotFoundError, lambda: litellm.completion(model="openai/none", messages=HELLO, **AT))
    raises(
        litellm.BadRequestError, lambda: litellm.completion(model="openai/tiny", messages=HELLO, temperature=9, **AT)
    )
    raises(
        litellm.ContextWindowExceededError,
        lambda: litellm.completion(model="openai/tiny", messages=[{"role": "user", "content": "x " * 5000}], **AT),
    )


@feature
def router():
    router = litellm.Router(
        model_list=[
            {"model_name": "any", "litellm_params": {"model": "openai/talker", "api_base": URL, "api_key": "none"}},
            {"model_name": "any", "litellm_params": {"model": "openai/tiny", "api_base": URL, "api_key": "none"}},
        ]
    )
    assert router.completion(model="any", messages=HELLO, max_tokens=4).choices


run()
