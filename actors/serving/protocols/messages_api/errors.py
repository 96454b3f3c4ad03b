"""Errors in the format of Anthropic's API, for its clients."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Scope

from raytide.actors.serving.openai_api.errors import ApiError

_PATH, _MODELS = "/v1/messages", "/v1/models"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetails(BaseModel):
    error_code: str


class MessagesErrorDetail(BaseModel):
    type: str
    message: str
    details: ErrorDetails | None = None


class MessagesError(BaseModel):
    """The body of an error response of Anthropic's API."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


def is_anthropic(scope: Scope) -> bool:
    """Returns whether a request belongs to Anthropic's API. The path decides. Some paths exist in both OpenAI's and
    Anthropic's API. For these paths, the header `anthropic-version` decides, because only Anthropic's clients send it.
    """
    path: str = scope["path"]
    if path == _PATH or path.startswith(f"{_PATH}/"):
        return True
    return path.startswith(_MODELS) and "anthropic-version" in Headers(scope=scope)


def error_body(error: ApiError, request_id: str = "") -> dict[str, Any]:
    """Returns the body of an error. `details.error_code` is the `code` of OpenAI's errors."""
    found = error.body.error
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body: dict[str, Any] = {"type": kind, "message": found.message}
    if found.code is not None:
        body["details"] = {"error_code": found.code}
    return {"type": "error", "error": body, "request_id": request_id or None}
