"""instructor: models of pydantic out of tools and JSON."""

import asyncio
from collections.abc import Iterable
from typing import Literal

import instructor
from features import URL, feature, raises, run
from instructor.core.exceptions import InstructorRetryException
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

HELLO = [{"role": "user", "content": "the tide comes in"}]


class Place(BaseModel, extra="forbid"):
    """A place."""

    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=-40, le=50)


class weather(BaseModel):  # noqa: N801  # a tool by this name
    """The weather of a city."""

    city: str


def client(mode):
    return instructor.from_openai(OpenAI(base_url=URL, api_key="none", max_retries=0), mode=mode)


ASK = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "max_retries": 0}


@feature
def tools():
    place, raw = client(instructor.Mode.TOOLS).chat.completions.create_with_completion(response_model=Place, **ASK)
    assert isinstance(place, Place)
    assert raw.usage.total_tokens


@feature
def tools_strict():
    assert client(instructor.Mode.TOOLS_STRICT).chat.completions.create(response_model=Place, **ASK)


@feature
def json_schema():
    assert client(instructor.Mode.JSON_SCHEMA).chat.completions.create(response_model=Place, **ASK)


@feature
def partial():
    *_, last = client(instructor.Mode.TOOLS).chat.completions.create_partial(response_model=Place, **ASK)
    assert last.city in ("Oslo", "Rome")


@feature
def parallel_tools():
    found = client(instructor.Mode.PARALLEL_TOOLS).chat.completions.create(
        response_model=Iterable[weather], stop=["<END>"], **ASK | {"model": "caller"}
    )
    assert [each.city for each in found] == ["Oslo"]


@feature
def responses_api():
    for mode in (instructor.Mode.RESPONSES_TOOLS, instructor.Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS):
        ask = {"model": "tiny", "messages": HELLO, "max_output_tokens": 300, "max_retries": 0}
        place, raw = client(mode).responses.create_with_completion(response_model=Place, **ask)
        assert isinstance(place, Place)
        assert raw.usage.total_tokens
        assert isinstance(client(mode).chat.completions.create(response_model=Place, **ask), Place)


@feature
def responses_api_streamed():
    ask = {"model": "tiny", "messages": HELLO, "max_output_tokens": 300, "max_retries": 0}
    *_, last = client(instructor.Mode.RESPONSES_TOOLS).responses.create_partial(response_model=Place, **ask)
    assert last.city in ("Oslo", "Rome")


@feature
def responses_api_asynchronous():
    async def one():
        made = instructor.from_openai(
            AsyncOpenAI(base_url=URL, api_key="none", max_retries=0), mode=instructor.Mode.RESPONSES_TOOLS
        )
        ask = {"model": "tiny", "messages": HELLO, "max_output_tokens": 300, "max_retries": 0}
        return await made.responses.create(response_model=Place, **ask)

    assert isinstance(asyncio.run(one()), Place)


@feature
def from_provider():
    made = instructor.from_provider("openai/tiny", base_url=URL, api_key="none", mode=instructor.Mode.TOOLS)
    assert isinstance(made.create(response_model=Place, messages=HELLO, max_tokens=200, max_retries=0), Place)


@feature
def retries():
    """The answer is no JSON: instructor asks again, with what was wrong in the history."""
    error = raises(
        InstructorRetryException,
        lambda: client(instructor.Mode.MD_JSON).chat.completions.create(
            response_model=Place, stop=["de"], **ASK | {"model": "talker", "max_retries": 2}
        ),
    )
    assert error.n_attempts >= 2


run()
