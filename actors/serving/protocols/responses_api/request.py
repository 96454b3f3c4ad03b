"""The request body of `/v1/responses`, and its translation into a chat request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from raytide.actors.engine.limits import MAX_LOGPROBS, MAX_MESSAGES, MAX_TOOLS
from raytide.actors.serving.openai_api.errors import ApiError, invalid
from raytide.actors.serving.openai_api.wire import ChatRequest, Count, Int32, Name, only_these

_NO_EFFECT = frozenset(
    {
        *("truncation", "include", "service_tier", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "max_tool_calls", "stream_options"),
    }
)
"""Known fields that do not change the text of an answer here."""
_UNSUPPORTED = {
    "background": False,
    "context_management": [],
    "conversation": None,
    "moderation": None,
    "prompt": None,
}
"""Known fields that this server does not implement, with the value that asks for nothing."""
_CHAT_FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat that have other names here."""
_TEXT_PARTS = ("input_text", "output_text", "text")

MAX_METADATA = 64
"""The most entries of metadata, which the answer repeats."""

Item = dict[str, Any]


class Reasoning(BaseModel):
    """The reasoning options of a request. In OpenAI's API, further options say how much of the reasoning to show. This
    server ignores them and always shows all of the reasoning.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    effort: Name | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    format: Item | None = None


class ResponsesRequest(BaseModel):
    """A request of the Responses API.

    Fields that are not listed here stay in `model_extra`. `chat_request` refuses unlisted fields that it cannot honour.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, json_schema_extra=only_these(_NO_EFFECT))

    model: Name
    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    tools: Annotated[list[Item], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Item | None = None
    parallel_tool_calls: bool | None = None
    text: TextFormat | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[Name, str], Field(max_length=MAX_METADATA)] | None = None
    user: Name | None = None
    store: bool | None = None
    previous_response_id: Name | None = None
    priority: Int32 | None = None
    """An extension, as in chat requests."""


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """Returns the request as a chat request. Raises ApiError (400) if a field cannot be honoured. The error names the
    field.

    Also raises pydantic's ValidationError, which has the chat's field names. `in_responses` translates these names.
    """
    for name, value in (request.model_extra or {}).items():
        if value is None or name in _NO_EFFECT or (name in _UNSUPPORTED and value == _UNSUPPORTED[name]):
            continue
        if name == "conversation":
            raise invalid("conversation: use previous_response_id, or send the whole input.", param=name)
        known = name in _UNSUPPORTED
        raise invalid(
            f"{name} is not supported by this model server." if known else f"Unrecognized request argument: {name}.",
            param=name,
        )
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": _messages(request),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
        "tools": [_tool(tool, place) for place, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request.text),
        "reasoning_effort": request.reasoning and request.reasoning.effort,
        "priority": request.priority,
    }
    if request.top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    fields |= {"prompt_cache_key": (request.model_extra or {}).get("prompt_cache_key"), "user": request.user}
    return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})


def in_responses(error: ApiError) -> ApiError:
    """Returns a chat request's error with the field names of the Responses API in place of the chat's field names."""
    found = error.body.error
    if found.param is not None:
        first, *rest = found.param.replace("[", ".[").split(".")
        path = [_CHAT_FIELDS.get(first, first), *(each for each in rest if each not in ("function", "json_schema"))]
        found.param = "input" if first == "messages" else ".".join(path).replace(".[", "[")
    return error


def _messages(request: ResponsesRequest) -> list[Item]:
    messages: list[Item] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for place, item in enumerate(request.input):
        where = f"input[{place}]"
        match item.get("type", "message"):
            case "message":
                content = _content(item.get("content"), f"{where}.content")
                messages.append({"role": item.get("role"), "content": content})
            case "function_call":
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = _text(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":
                continue  # an earlier answer's, which templates leave out of later prompts
            case other:
                raise invalid(f"{where}: items of type {other!r} are not supported by this model server.", param=where)
    return messages


def _content(content: Any, where: str) -> Any:
    """Returns an item's content in a chat's form: a text, or a list of parts if there is an image in it."""
    has_images = isinstance(content, list) and any(_is_image(part) for part in content)
    if not has_images:
        return _text(content, where)
    return [
        _image(part, f"{where}[{place}]")
        if _is_image(part)
        else {"type": "text", "text": _text([part], where, first=place)}
        for place, part in enumerate(content)
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image(part: Item, where: str) -> Item:
    """Returns an image as a part of a chat. `detail` is left out, because a model reads all images at one size."""
    url = part.get("image_url")
    if not isinstance(url, str):
        raise invalid(f"{where}: an image is read from its image_url, not from a file.", param=where)
    return {"type": "image_url", "image_url": {"url": url}}


def _text(content: Any, where: str, first: int = 0) -> Any:
    """Returns the joined texts of a list of parts. Anything but a list is returned unchanged; if it is no text, the
    chat's validation refuses it.
    """
    if not isinstance(content, list):
        return content
    for place, part in enumerate(content, first):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise invalid(f"{where}[{place}]: only texts and images are read here.", param=f"{where}[{place}]")
    return "".join(part["text"] for part in content)


def _tool(tool: Item, place: int) -> Item:
    if tool.get("type") != "function":
        raise invalid(
            f"tools[{place}]: tools of type {tool.get('type')!r} are not supported by this model server.",
            param=f"tools[{place}].type",
        )
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Item | None) -> str | Item | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            named = [each.get("name") if isinstance(each, dict) else each for each in tools]
            tools = [{"type": "function", "function": {"name": name}} for name in named]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _response_format(text: TextFormat | None) -> Item | None:
    if text is None or text.format is None:
        return None
    if text.format.get("type") != "json_schema":
        return text.format
    return {"type": "json_schema", "json_schema": {k: v for k, v in text.format.items() if k != "type"}}
