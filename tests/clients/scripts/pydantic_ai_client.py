"""pydantic-ai, over chat completions and over the Responses API."""

import asyncio
from typing import Literal

from features import URL, feature, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=URL, api_key="none")


class Place(BaseModel, extra="forbid"):
    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=-40, le=50)


def weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"rain in {city}"


def weather_of(city: Literal["Oslo", "Rome"]) -> str:
    """Returns the weather of a city. A model that learned nothing may never end a string of any length."""
    return f"rain in {city}"


def agents(name, **options):
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        yield Agent(kind(name, provider=PROVIDER), **{"model_settings": {"max_tokens": 300}, **options})


@feature
def an_agent_calls_a_tool_and_answers():
    for agent in agents("agent", tools=[weather], instructions="Be brief."):
        answer = agent.run_sync("The weather in Oslo?")
        assert answer.output == "The tool says: rain in Oslo."
        assert answer.usage.requests == 2


@feature
def streamed():
    async def one(agent):
        async with agent.run_stream("The weather in Oslo?") as running:
            return [text async for text in running.stream_text(delta=True, debounce_by=None)]

    for agent in agents("agent", tools=[weather]):
        parts = asyncio.run(one(agent))
        assert "".join(parts) == "The tool says: rain in Oslo."
        assert len(parts) > 3


@feature
def structured_output_by_tool_and_by_format():
    for way in (ToolOutput(Place), NativeOutput(Place)):
        for agent in agents("tiny", output_type=way):
            assert isinstance(agent.run_sync("Where?").output, Place)


@feature
def structured_output_and_tools():
    """The random weights call the tool a few times before they answer."""
    for agent in agents("tiny", output_type=NativeOutput(Place), tools=[weather_of]):
        assert isinstance(agent.run_sync("Where?").output, Place)


@feature
def structured_output_streamed():
    async def one(agent):
        async with agent.run_stream("Where?") as running:
            return [each async for each in running.stream_output()]

    for agent in agents("tiny", output_type=NativeOutput(Place)):
        assert isinstance(asyncio.run(one(agent))[-1], Place)


@feature
def history():
    for agent in agents("agent", tools=[weather]):
        first = agent.run_sync("The weather in Oslo?")
        again = agent.run_sync("And now?", message_history=first.all_messages())
        assert again.output == "The tool says: rain in Oslo."


run()
