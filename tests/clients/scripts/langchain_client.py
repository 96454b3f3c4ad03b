"""LangChain's ChatOpenAI, OpenAI and OpenAIEmbeddings."""

import asyncio
from typing import Literal

from features import URL, feature, run
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

AT = {"base_url": URL, "api_key": "none", "max_retries": 0}


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


class Place(BaseModel, extra="forbid"):
    """A place."""

    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=-40, le=50)


def chat(model, **options):
    return ChatOpenAI(model=model, **AT, **{"max_tokens": 200, "stream_usage": True, **options})


@feature
def invoke_stream_and_batch():
    talker = chat("talker", max_tokens=8)
    assert talker.invoke("hello").content == "tide tid"
    parts = list(talker.stream("hello"))
    assert "".join(part.content for part in parts) == "tide tid"
    assert sum(parts[1:], parts[0]).usage_metadata["output_tokens"] == 8
    assert len(talker.batch(["a", "b", "c"])) == 3
    assert asyncio.run(talker.ainvoke("hello")).content == "tide tid"


@feature
def bind_tools():
    answer = chat("caller", stop=["<END>"]).bind_tools([weather]).invoke("hello")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"city": "Oslo"})]


@feature
def bind_tools_streamed():
    whole = AIMessageChunk(content="")
    for part in chat("caller", stop=["<END>"]).bind_tools([weather]).stream("hello"):
        whole += part
    assert whole.tool_calls[0]["args"] == {"city": "Oslo"}


@feature
def tool_choice_any_and_named():
    for choice in ("any", "weather"):
        bound = chat("tiny").bind_tools([weather], tool_choice=choice, strict=True, parallel_tool_calls=False)
        (call,) = bound.invoke("hello").tool_calls
        assert call["args"]["city"] in ("Oslo", "Rome")


@feature
def an_agents_turns():
    question = HumanMessage("hello")
    asked = chat("caller", stop=["<END>"]).bind_tools([weather]).invoke([question])
    results = [weather.invoke(call) for call in asked.tool_calls]
    assert isinstance(results[0], ToolMessage)
    assert chat("talker", max_tokens=4).invoke([question, asked, *results]).content == "tide"


@feature
def structured_output():
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat("tiny").with_structured_output(Place, method=method).invoke("hello"), Place)
    strict = chat("tiny").with_structured_output(Place, method="json_schema", strict=True, include_raw=True)
    assert isinstance(strict.invoke("hello")["parsed"], Place)


@feature
def structured_output_and_tools():
    for api in (False, True):
        model = chat("tiny", use_responses_api=api, model_kwargs={"parallel_tool_calls": False})
        bound = model.with_structured_output(
            Place, method="json_schema", tools=[weather], strict=True, include_raw=True
        )
        answer = bound.invoke("hello")
        assert isinstance(answer["parsed"], Place) or answer["raw"].tool_calls[0]["args"]["city"] in ("Oslo", "Rome")


@feature
def structured_output_streamed():
    *_, last = chat("tiny").with_structured_output(Place).stream("hello")
    assert Place.model_validate(last)


@feature
def responses_api():
    answer = chat("talker", use_responses_api=True, max_tokens=8).invoke("hello")
    assert answer.text == "tide tid"
    bound = chat("tiny", use_responses_api=True).bind_tools(
        [weather], tool_choice="any", strict=True, parallel_tool_calls=False
    )
    assert bound.invoke("hello").tool_calls[0]["args"]["city"] in ("Oslo", "Rome")


@feature
def responses_api_streamed():
    parts = list(chat("talker", use_responses_api=True, max_tokens=8).stream("hello"))
    assert "".join(part.text for part in parts) == "tide tid"


@feature
def log_probabilities():
    answer = chat("tiny", max_tokens=4).bind(logprobs=True, top_logprobs=2).invoke("hello")
    assert answer.response_metadata["logprobs"]["content"]


@feature
def embeddings():
    """LangChain cuts texts into tokens of OpenAI's own models by default; other models need that turned off."""
    embed = OpenAIEmbeddings(model="tiny", check_embedding_ctx_length=False, chunk_size=2, **AT)
    vectors = embed.embed_documents(["a", "b", "c", "d", "e"])
    assert len(vectors) == 5
    one, two = embed.embed_query("e"), asyncio.run(embed.aembed_documents(["e"]))[0]
    assert max(abs(a - b) for a, b in zip(one, vectors[4], strict=True)) < 1e-5
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5


@feature
def completions_and_embeddings():
    assert OpenAI(model="talker", max_tokens=4, **AT).invoke("x") == "tide"
    vectors = OpenAIEmbeddings(model="tiny", check_embedding_ctx_length=False, **AT).embed_documents(["a", "b"])
    assert len(vectors) == 2


run()
