"""LiteLLM: its SDK and its router."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import asyncio
import json
import time

import litellm
from features import KEYS, URL, feature, raises, run

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
def responses_streamed_and_stored():
    events = list(litellm.responses(model="openai/talker", input="hello", max_output_tokens=16, stream=True, **AT))
    assert events[-1].type in ("response.completed", "response.incomplete")
    last = events[-1].response
    ask = {"model": "openai/talker", "input": "more", "previous_response_id": last.id, "max_output_tokens": 16}
    assert litellm.responses(**ask, **AT).usage.input_tokens > last.usage.input_tokens
    found = litellm.get_responses(response_id=last.id, custom_llm_provider="openai", **CALL)
    assert found.output[0].content[0].text == "tide tide tide t"
    litellm.delete_responses(response_id=last.id, custom_llm_provider="openai", **CALL)


@feature
def responses_with_tools():
    tool = {"type": "function", "strict": True, **TOOLS[0]["function"]}
    answer = litellm.responses(
        model="openai/tiny", input="hello", tools=[tool], tool_choice="required", max_output_tokens=200, **AT
    )
    calls = [each for each in answer.output if each.type == "function_call"]
    assert json.loads(calls[0].arguments)["city"] in ("Oslo", "Rome")


def rows(count):
    body = {"model": "talker", "messages": HELLO, "max_tokens": 4}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return "\n".join(json.dumps({"custom_id": f"row-{n}", **line}) for n in range(count)).encode()


CALL = {"api_base": URL, "api_key": "none"}
OPENAI = {"custom_llm_provider": "openai", **CALL}


@feature
def files_and_batches():
    content = rows(3)
    file = litellm.create_file(file=("rows.jsonl", content), purpose="batch", **OPENAI)
    assert litellm.file_content(file_id=file.id, **OPENAI).content == content
    assert litellm.file_retrieve(file_id=file.id, **OPENAI).bytes == len(content)
    assert file.id in [each.id for each in litellm.file_list(**OPENAI)]
    batch = litellm.create_batch(
        completion_window="24h",
        endpoint="/v1/chat/completions",
        input_file_id=file.id,
        metadata={"project": "search"},
        **OPENAI,
    )
    until_s = time.monotonic() + 120
    while (batch := litellm.retrieve_batch(batch_id=batch.id, **OPENAI)).status != "completed":
        assert time.monotonic() < until_s, batch
        time.sleep(0.1)
    assert (batch.request_counts.completed, batch.metadata) == (3, {"project": "search"})
    answers = [
        json.loads(line) for line in litellm.file_content(file_id=batch.output_file_id, **OPENAI).text.splitlines()
    ]
    assert [each["custom_id"] for each in answers] == ["row-0", "row-1", "row-2"]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "tide"
    assert batch.id in [each.id for each in litellm.list_batches(**OPENAI).data]
    assert litellm.file_delete(file_id=file.id, **OPENAI).deleted


@feature
def files_and_batches_asynchronous():
    async def one():
        file = await litellm.acreate_file(file=("rows.jsonl", rows(500)), purpose="batch", **OPENAI)
        batch = await litellm.acreate_batch(
            completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id, **OPENAI
        )
        await litellm.acancel_batch(batch_id=batch.id, **OPENAI)
        until_s = time.monotonic() + 120
        while (batch := await litellm.aretrieve_batch(batch_id=batch.id, **OPENAI)).status != "cancelled":
            assert time.monotonic() < until_s, batch
            await asyncio.sleep(0.1)

    asyncio.run(one())


@feature
def router_of_files_and_batches():
    router = litellm.Router(model_list=[{"model_name": "any", "litellm_params": {"model": "openai/talker", **CALL}}])

    async def one():
        file = await router.acreate_file(model="any", file=("rows.jsonl", rows(2)), purpose="batch")
        return await router.acreate_batch(
            model="any", completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id
        )

    assert asyncio.run(one()).status in ("validating", "in_progress", "completed")


@feature
def keys_and_limits():
    def ask(key, **options):
        return litellm.completion(model="openai/talker", messages=HELLO, **{**AT, "api_key": KEYS[key]}, **options)

    raises(
        litellm.AuthenticationError,
        lambda: litellm.completion(model="openai/talker", messages=HELLO, **{**AT, "api_key": "rk-" + "x" * 43}),
    )
    assert ask("scoped", max_tokens=4).choices[0].message.content == "tide"
    quota = raises(litellm.RateLimitError, lambda: ask("poor", max_tokens=4000))
    assert "insufficient_quota" in str(quota) or "quota" in str(quota)


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
