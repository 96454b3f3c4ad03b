"""The OpenAI Agents SDK, over chat completions and over the Responses API."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from features import URL, feature, run
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


class Place(BaseModel, extra="forbid"):
    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=-40, le=50)


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Returns the weather of a city. A model that learned nothing may never end a string of any length."""
    return f"rain in {city}"


def agents(name, **options):
    for kind in KINDS:
        client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
        settings = ModelSettings(max_tokens=300)
        yield Agent(
            name="tide", model=kind(model=name, openai_client=client), **{"model_settings": settings, **options}
        )


@feature
def an_agent_calls_a_tool_and_answers():
    for agent in agents("agent", tools=[weather], instructions="Be brief."):
        assert Runner.run_sync(agent, "The weather in Oslo?").final_output == "The tool says: rain in Oslo."


@feature
def streamed():
    async def one(agent):
        running = Runner.run_streamed(agent, "The weather in Oslo?")
        kinds = [event.type async for event in running.stream_events()]
        assert "raw_response_event" in kinds
        return running.final_output

    for agent in agents("agent", tools=[weather]):
        assert asyncio.run(one(agent)) == "The tool says: rain in Oslo."


@feature
def structured_output():
    for agent in agents("tiny", output_type=Place):
        assert isinstance(Runner.run_sync(agent, "Where?").final_output, Place)


@feature
def structured_output_and_tools():
    """The random weights call the tool, whose result is then the output, or answer with a Place."""
    options = {"output_type": Place, "tools": [weather], "tool_use_behavior": "stop_on_first_tool"}
    for agent in agents("tiny", **options):
        output = Runner.run_sync(agent, "Where?").final_output
        assert isinstance(output, Place) or output.startswith("rain in "), output


@feature
def required_tools():
    settings = ModelSettings(max_tokens=300, tool_choice="required", parallel_tool_calls=False)
    for agent in agents("tiny", tools=[weather], model_settings=settings, tool_use_behavior="stop_on_first_tool"):
        assert Runner.run_sync(agent, "The weather?").final_output.startswith("rain in ")


@feature
def handoffs():
    for one, other in zip(agents("tiny"), agents("agent", tools=[weather]), strict=True):
        one.handoffs = [handoff(other)]
        one.model_settings = ModelSettings(max_tokens=300, tool_choice="required", parallel_tool_calls=False)
        assert Runner.run_sync(one, "The weather in Oslo?").final_output == "The tool says: rain in Oslo."


run()
