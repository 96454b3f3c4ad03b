"""Failures as OpenAI's clients expect them: an HTTP status, and a body with message, type, param and code.

The official client retries 408, 409, 429 and all statuses from 500 on. The choice of the status thus decides whether
the client tries again.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from raytide.core.errors import OverloadedError, RaytideError

RETRY_AFTER_S = 1
_INVALID = "invalid_request_error"
_MAX_MESSAGE_CHARS = 2000


class ErrorDetail(BaseModel):
    """The `error` object of an OpenAI error.

    All four keys are always present: OpenAI's schema requires them.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(Exception):
    """The failure of one HTTP request: the status, headers and body of the response."""

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
        self.is_counted = False
        """True once metrics have counted this error."""
        self.body = ErrorBody(error=ErrorDetail(message=message, type=type, param=param, code=code))


def invalid(message: str, *, param: str | None, code: str | None = None, status: int = 400) -> ApiError:
    """Returns the error of an invalid request, which the client should not retry."""
    return ApiError(status, message, type=_INVALID, param=param, code=code)


def overloaded(message: str) -> ApiError:
    """Returns the error of a full queue (429). The header `retry-after` tells the client how many seconds to wait
    before a retry.
    """
    return ApiError(
        429, message, type="requests", code="rate_limit_exceeded", headers={"retry-after": str(RETRY_AFTER_S)}
    )


def client_gone() -> ApiError:
    """Returns the error of a request whose client has closed the connection. The status is nginx's 499."""
    return ApiError(499, "The client has closed the connection.", type="invalid_request_error", code="client_gone")


def timed_out() -> ApiError:
    """Returns the error of a request that reached its own deadline. The error tells the client not to retry, because a
    retry would take as long.
    """
    message = "The request did not end within its timeout."
    return ApiError(504, message, type="server_error", code="timeout", headers={"x-should-retry": "false"})


def _printable(text: str) -> str:
    """Returns a client's text as valid UTF-8, cut to a maximum length."""
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
    """Returns an internal error as an error for the client. The text of an unexpected error is not sent to the
    client.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return overloaded(str(error))
    if isinstance(error, RaytideError):
        kind = _INVALID if error.http_status < 500 else "server_error"
        return ApiError(error.http_status, str(error), type=kind, code=error.code)
    return ApiError(500, "The server failed; its log says why.", type="server_error", code="internal_error")


def validation_error(errors: Sequence[dict[str, object]]) -> ApiError:
    """Converts FastAPI's validation errors to one error with the status 400. Like OpenAI's errors, the error names one
    field: the first bad field.
    """
    first = errors[0]
    if first.get("type") == "json_invalid":
        return invalid("The body is not valid JSON.", param=None)
    param = _param(first.get("loc"))
    if first.get("type") == "extra_forbidden":
        return invalid(f"Unrecognized request argument: {param}.", param=param)
    message = str(first.get("msg", "invalid value")).removeprefix("Value error, ")
    return invalid(f"{param or 'body'}: {message}.", param=param)


def _param(location: object) -> str | None:
    """Turns ("body", "messages", 0, "role") into "messages[0].role", without the tags of unions; None for the whole
    body.
    """
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
