"""LlamaIndex's OpenAILike and its embeddings."""

import asyncio
from typing import Literal

from features import URL, feature, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

HELLO = [ChatMessage(role="user", content="hello")]


class Place(BaseModel, extra="forbid"):
    """A place."""

    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=-40, le=50)


def weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"rain in {city}"


def llm(model, **options):
    chat = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048, "max_tokens": 300}
    return OpenAILike(model=model, api_base=URL, api_key="none", max_retries=0, **{**chat, **options})


@feature
def chat_complete_and_stream():
    assert llm("talker", max_tokens=8).chat(HELLO).message.content == "tide tid"
    assert [*llm("talker", max_tokens=8).stream_chat(HELLO)][-1].message.content == "tide tid"
    assert llm("talker", max_tokens=8).complete("hello").text == "tide tid"
    plain = llm("talker", max_tokens=8, is_chat_model=False, is_function_calling_model=False)
    assert plain.complete("hello").text == "tide tid"
    assert [*plain.stream_complete("hello")][-1].text == "tide tid"


@feature
def structured_output():
    assert isinstance(llm("tiny").as_structured_llm(Place).complete("Where?").raw, Place)
    formatted = llm("tiny", should_use_structured_outputs=True)
    assert isinstance(formatted.as_structured_llm(Place).complete("Where?").raw, Place)


@feature
def tools():
    tool = FunctionTool.from_defaults(weather)
    answer = llm("tiny").chat_with_tools([tool], user_msg="hello", tool_required=True)
    assert llm("tiny").get_tool_calls_from_response(answer)[0].tool_name == "weather"
    answer = llm("agent").predict_and_call([tool], user_msg="The weather in Oslo?")
    assert str(answer) == "rain in Oslo"


@feature
def an_agent():
    async def one(streaming):
        agent = FunctionAgent(tools=[weather], llm=llm("agent"), streaming=streaming)
        return str(await agent.run("The weather in Oslo?"))

    for streaming in (True, False):
        assert asyncio.run(one(streaming)) == "The tool says: rain in Oslo."


@feature
def embeddings():
    embed = OpenAILikeEmbedding(model_name="tiny", api_base=URL, api_key="none")
    assert len(embed.get_text_embedding_batch(["a", "b", "c"])) == 3


run()
