"""Failures as OpenAI's clients expect them: an HTTP status, and a body with message, type, param and code.

The official client retries 408, 409, 429 and 500 upwards by itself: a status also says whether to try again.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from raytide.core.errors import EngineDeadError, OverloadedError, RaytideError

__all__ = [
    "RETRY_AFTER_S",
    "RETRY_ELSEWHERE",
    "ApiError",
    "ErrorBody",
    "ErrorDetail",
    "invalid",
    "overloaded",
    "refused_by_the_dead",
    "to_api_error",
    "too_large",
    "validation_error",
]

RETRY_AFTER_S = 1
RETRY_ELSEWHERE = "x-raytide-retry-elsewhere"
"""The header with which a replica whose engine is dead asks the proxy to try another one."""
_INVALID = "invalid_request_error"
_MAX_MESSAGE_CHARS = 2000


class ErrorDetail(BaseModel):
    """All four keys are always sent: OpenAI's schema requires them."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(Exception):
    """One failed HTTP request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message, param = _printable(message), param and _printable(param)
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = ErrorBody(error=ErrorDetail(message=message, type=type, param=param, code=code))


def invalid(message: str, *, param: str | None, code: str | None = None, status: int = 400) -> ApiError:
    """The request itself is wrong: sending it again changes nothing."""
    return ApiError(status, message, type=_INVALID, param=param, code=code)


def overloaded(message: str) -> ApiError:
    """The queue is full: the same request may pass a moment later."""
    return ApiError(
        429, message, type="requests", code="rate_limit_exceeded", headers={"retry-after": str(RETRY_AFTER_S)}
    )


def refused_by_the_dead(error: EngineDeadError) -> ApiError:
    """For a request that came after the engine's death: another replica may answer it. One that was in flight then is
    not sent elsewhere by itself, since it may have been the cause.
    """
    headers = {"retry-after": str(RETRY_AFTER_S), RETRY_ELSEWHERE: "1"}
    return ApiError(error.http_status, str(error), type="server_error", code=error.code, headers=headers)


def _printable(text: str) -> str:
    """A text of the client's own may be of any length, and may be none that UTF-8 can hold."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}..."


def too_large(limit: int) -> ApiError:
    return invalid(
        f"The body is larger than {limit} bytes, which is what this server reads of a request.",
        param=None,
        code="request_too_large",
        status=413,
    )


def to_api_error(error: Exception) -> ApiError:
    """What a client is told of an error from inside. Unplanned errors keep their text to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return overloaded(str(error))
    if isinstance(error, RaytideError):
        kind = _INVALID if error.http_status < 500 else "server_error"
        return ApiError(error.http_status, str(error), type=kind, code=error.code)
    return ApiError(500, "The server failed; its log says why.", type="server_error", code="internal_error")


def validation_error(errors: Sequence[dict[str, object]]) -> ApiError:
    """FastAPI's findings (it would answer 422, which OpenAI never does) as one 400 that names the first bad field."""
    first = errors[0]
    if first.get("type") == "json_invalid":
        return invalid("The body is not valid JSON.", param=None)
    param = _param(first.get("loc"))
    message = str(first.get("msg", "invalid value")).removeprefix("Value error, ")
    return invalid(f"{param or 'body'}: {message}.", param=param)


def _param(location: object) -> str | None:
    """("body", "messages", 0, "role") -> "messages[0].role"; tags of unions, which no client wrote, are left out."""
    if not isinstance(location, tuple):
        return None
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif str(part).isidentifier() and str(part) not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else str(part)
        else:
            break
    return path or None
