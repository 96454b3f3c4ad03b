"""instructor: models of pydantic out of tools and JSON."""

from collections.abc import Iterable
from typing import Literal

import instructor
from features import URL, feature, raises, run
from instructor.core.exceptions import InstructorRetryException
from openai import OpenAI
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
