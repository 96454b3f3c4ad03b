"""The types of request paths, queries and bodies, with their bounds, and the thread pools for routes that block.

Every route takes its input through these types. They therefore guarantee the following for all routes.

- No number is infinite or beyond 64 bits.
- No name in a path or query contains control characters.
- No text in a body contains a NUL or half of a surrogate pair.
- No body exceeds the depth or the number of values that a spec may have.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NoReturn, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Path, Query
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request

from raytide.control.api.auth import Caller
from raytide.core.errors import UsageError

T = TypeVar("T")

MOST_DEPTH = 64
MOST_VALUES = 20_000
_MOST_INT = 2**64
_LATEST_S = 1e11
"""The latest time that is accepted, in seconds since the epoch: about three thousand years from now."""
_BAD_TEXT = re.compile("[\0\ud800-\udfff]")

_NAME = r"^[^\x00-\x1f\x7f/]+$"
_MOST_NAME = 200
Name = Annotated[str, Path(min_length=1, max_length=_MOST_NAME, pattern=_NAME)]
"""The id of a job, the name of an endpoint or of a team."""
Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]
"""A package's SHA-256, in hex."""
Key = Annotated[str | None, Query(pattern=r"^[!-~]{1,128}$")]
"""An idempotency key: printable ASCII without spaces."""
Limit = Annotated[int, Query(ge=1, le=2**31 - 1)]
Offset = Annotated[int, Query(ge=0, le=2**63 - 1)]
Tail = Annotated[int | None, Query(ge=0, le=2**31 - 1)]
Points = Annotated[int, Query(ge=2, le=2000)]
"""The number of points of a curve."""
Place = Annotated[str, Query(max_length=64)]
LogPlaces = Annotated[str, Query(max_length=16_384)]
Since = Annotated[float, Query(ge=0, le=_LATEST_S, allow_inf_nan=False)]
Until = Annotated[float | None, Query(ge=0, le=_LATEST_S, allow_inf_nan=False)]
Word = Annotated[str | None, Query(min_length=1, max_length=256, pattern=_NAME)]
"""A value that records must have to pass a filter."""
Number = Annotated[int | None, Query(ge=0, le=2**63 - 1)]
VersionNumber = Annotated[int, Path(ge=1, le=10**9)]
Revision = Annotated[int, Query(ge=1, le=2**31 - 1)]
Grace = Annotated[float, Query(ge=0, le=366 * 86_400, allow_inf_nan=False)]
Head = Annotated[str | None, Query(pattern=r"^[0-9]{1,18}:[0-9a-f]{64}$")]
"""The number and SHA-256 of an entry of the audit log, `NUMBER:HASH`."""
Usd = Annotated[float | None, Query(gt=0, le=1e12, allow_inf_nan=False)]


class Poll(BaseModel):
    """The query parameters of a long poll for a lease or for the API keys. Polls are frequent, so they bypass FastAPI's
    validation.
    """

    newer_than: int = Field(default=-1, ge=-1, le=2**63 - 1)
    timeout_s: float = Field(default=0.0, ge=0, le=86_400, allow_inf_nan=False)
    gateway: str = Field(default="", max_length=100)
    """The name of the gateway that polls for keys."""

    @classmethod
    def from_request(cls, request: Request) -> Poll:
        try:
            return cls.model_validate(dict(request.query_params))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UsageError(f"malformed request: {where}: {first['msg']}.", hint="Correct it.") from None


async def in_pool(pool: CapacityLimiter, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Runs a blocking function in a thread of this pool and returns its result."""
    return await to_thread.run_sync(partial(work, *args, **kwargs), limiter=pool)


def checked_name(name: str) -> str:
    if len(name) > _MOST_NAME or not re.match(_NAME, name):
        raise UsageError("malformed request: not a valid job id.", hint="`raytide ps` lists jobs.")
    return name


def parse_object(raw: bytes) -> dict[str, Any]:
    """Returns the JSON object in a request body. Raises UsageError if the body is not a JSON object. Also raises
    UsageError if the object is too large or nested too deeply, or if a number or a text in it cannot be stored.
    """
    try:
        found = json.loads(raw.decode(), parse_constant=_no_constant)
    except RecursionError:
        _refuse(f"nests deeper than {MOST_DEPTH} levels")
    except ValueError as error:
        _refuse(f"is not JSON: {str(error)[:200]}")
    if not isinstance(found, dict):
        _refuse("is not a JSON object")
    _check(found)
    return found


async def authenticated(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


CallerInput = Annotated[Caller, Depends(authenticated)]


async def json_object(request: Request) -> dict[str, Any]:
    return parse_object(await request.body())


Body = Annotated[dict[str, Any], Depends(json_object)]


def _check(value: object) -> None:
    """Checks the values level by level, without recursion, because the depth is one of the checks."""
    level: list[tuple[str, object]] = [("", value)]
    values = 0
    for _ in range(MOST_DEPTH):
        values += len(level)
        if values > MOST_VALUES:
            _refuse(f"holds more than {MOST_VALUES:,} values")
        inner: list[tuple[str, object]] = []
        for where, each in level:
            if isinstance(each, dict):
                for key in each:
                    _check_text(key, where)
                inner.extend((where or key[:100], below) for key, below in each.items())
            elif isinstance(each, list):
                inner.extend((where, below) for below in each)
            elif isinstance(each, str):
                _check_text(each, where)
            elif isinstance(each, float) and not math.isfinite(each):
                _refuse("holds a number that is not finite", where)
            elif isinstance(each, int) and abs(each) >= _MOST_INT:
                _refuse("holds a whole number of more than 64 bits", where)
        if not inner:
            return
        level = inner
    _refuse(f"nests deeper than {MOST_DEPTH} levels")


def _check_text(text: str, where: str) -> None:
    if _BAD_TEXT.search(text):
        _refuse("holds text with a NUL or half of a surrogate pair", where)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse(why: str, where: str = "") -> NoReturn:
    """Raises the error of an invalid body. `where` is its top-level key."""
    named = f" in {where!r}" if where else ""
    raise UsageError(f"the request's body {why}{named}.", hint="Send one JSON object, as the client does.")
