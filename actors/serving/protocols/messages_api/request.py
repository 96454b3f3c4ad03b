"""The request body of `/v1/messages`, and its translation into a chat request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from raytide.actors.engine.limits import MAX_MESSAGES, MAX_STOPS, MAX_TEMPLATE_KWARGS, MAX_TIMEOUT_S, MAX_TOOLS
from raytide.actors.serving.openai_api.errors import ApiError, invalid
from raytide.actors.serving.openai_api.wire import ChatRequest, Count, Int32, Name, Word, only_these

Item = dict[str, Any]
Content = str | Sequence[Item]

_BILLING = "x-anthropic-billing-header"
"""The beginning of a system text in which Claude Code sends a hash of each request. In a prompt it would keep every
prefix from being cached.
"""
_THOUGHTS = ("thinking", "redacted_thinking")
"""Blocks of an earlier answer's reasoning, which templates leave out of later prompts."""
_NO_EFFECT = frozenset(
    {
        *("metadata", "service_tier", "cache_control", "context_management", "inference_geo", "speed", "diagnostics"),
        *("user_profile_id", "workspace_id", "betas"),
    }
)
"""Known fields that do not change the text of an answer here."""
_UNSUPPORTED = ("compaction", "container", "fallbacks", "mcp_servers")
"""Known fields that this server does not implement."""
_CHAT_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice",
}
"""Fields of a chat that have other names here."""


class Thinking(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class OutputFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Turn(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)]


class PromptRequest(BaseModel):
    """The fields that make a prompt. A request to `/v1/messages/count_tokens` has no other fields.

    Fields that are not listed here stay in `model_extra`. `chat_request` refuses unlisted fields that it cannot honour.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, json_schema_extra=only_these(_NO_EFFECT))

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Item], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=MAX_TEMPLATE_KWARGS)] | None = None


class MessagesRequest(PromptRequest):
    """A request of the Messages API. The fields from `cache_salt` on are extensions. Chat requests have the same
    extensions.
    """

    max_tokens: Count
    stop_sequences: Annotated[list[Word], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    cache_salt: Name | None = None
    priority: Int32 | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None

    @property
    def user(self) -> str | None:
        """The user id in `metadata`, or None. The requests of one user form a session."""
        metadata = (self.model_extra or {}).get("metadata")
        user = metadata.get("user_id") if isinstance(metadata, dict) else None
        return user if isinstance(user, str) else None


def chat_request(request: PromptRequest) -> ChatRequest:
    """Returns the request as a chat request. Raises ApiError (400) if a field cannot be honoured. The error names the
    field.

    Also raises pydantic's ValidationError. Its errors use the field names of the chat request. `in_messages`
    translates these names.
    """
    _refuse_unknown(request)
    fields = _prompt_fields(request)
    if isinstance(request, MessagesRequest):
        _check_thinking(request)
        format = request.output_config.format if request.output_config is not None else None
        fields |= {
            "max_completion_tokens": request.max_tokens,
            "response_format": format
            and {"type": "json_schema", "json_schema": {"name": "output", "schema": format.schema_}},
            "stop": request.stop_sequences or None,
            "user": request.user,
            **{
                name: getattr(request, name)
                for name in ("stream", "temperature", "top_k", "top_p", "cache_salt", "priority", "timeout")
            },
        }
    return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})


def in_messages(error: ApiError) -> ApiError:
    """Returns a chat request's error with the field names of the Messages API in place of the chat's field names."""
    found = error.body.error
    if found.param is not None:
        first, dot, rest = found.param.replace("[", ".[").partition(".")
        path = f"{_CHAT_FIELDS.get(first, first)}{dot}{rest}" if first != "messages" else "messages"
        path = path.replace(".[", "[").replace("].function.parameters", "].input_schema").replace("].function", "]")
        if found.message.startswith(found.param):
            found.message = found.message.replace(found.param, path, 1)
        elif path not in found.message:
            found.message = f"{path}: {found.message}"  # the only place that names the field
        found.param = path
    return error


def _refuse_unknown(request: PromptRequest) -> None:
    for name, value in (request.model_extra or {}).items():
        if value is None or name in _NO_EFFECT:
            continue
        if name == "thread":  # by this code clients know that they have to send the whole conversation
            message = "thread: this server keeps no conversations; send all messages."
            raise invalid(message, param=name, code="thread_unsupported_request")
        known = name in _UNSUPPORTED
        raise invalid(
            f"{name}: it is not supported by this model server." if known else f"{name}: unknown field.", param=name
        )


def _prompt_fields(request: PromptRequest) -> dict[str, Any]:
    messages = turns_of([(turn.role, turn.content) for turn in request.messages])
    if text := system_text(request.system):
        messages.insert(0, {"role": "system", "content": text})
    choice = request.tool_choice
    return {
        "model": request.model,
        "messages": messages,
        # An answer to a conversation that ends with the assistant's turn continues that turn.
        "continue_final_message": True if _is_open(messages[-1]) else None,
        "tools": [_tool(tool, place) for place, tool in enumerate(request.tools or ())] or None,
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": request.output_config and request.output_config.effort,
        "chat_template_kwargs": {**_thinking_kwargs(request.thinking), **(request.chat_template_kwargs or {})} or None,
    }


def _is_open(last: Item) -> bool:
    return last["role"] == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


def _thinking_kwargs(thinking: Thinking | None) -> Item:
    """Returns the template variables that turn reasoning on and off, under Qwen's and DeepSeek's names."""
    if thinking is None:
        return {}
    return dict.fromkeys(("enable_thinking", "thinking"), thinking.type != "disabled")


def _check_thinking(request: MessagesRequest) -> None:
    thinking = request.thinking
    if thinking is None or thinking.type != "enabled":
        return
    if thinking.budget_tokens is None:
        raise invalid("thinking.budget_tokens: it is missing.", param="thinking.budget_tokens")
    if thinking.budget_tokens >= request.max_tokens:
        raise invalid("thinking.budget_tokens: it must be less than max_tokens.", param="thinking.budget_tokens")


def _tool(tool: Item, place: int) -> Item:
    if tool.get("type") not in (None, "custom"):
        raise invalid(
            f"tools[{place}].type: tools of type {tool['type']!r} are not supported by this model server.",
            param=f"tools[{place}].type",
        )
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"tools[{place}].input_schema: it must be an object.", param=f"tools[{place}].input_schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | Item:
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name: it is missing.", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def system_text(system: Content | None) -> str:
    """Returns the text of a system prompt, without the texts that begin with Claude Code's billing header. Raises
    ApiError (400) for a block that is not text.
    """
    if isinstance(system, str) or system is None:
        return system or ""
    texts = [_text_of(block, f"system[{place}]") for place, block in enumerate(system)]
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


def turns_of(turns: Iterable[tuple[str, Content]]) -> list[Item]:
    """Returns turns of the Messages API as messages of a chat. Raises ApiError (400) for a content block that cannot be
    read, and names the block's place.
    """
    messages: list[Item] = []
    for index, (role, content) in enumerate(turns):
        where = f"messages[{index}].content"
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_answer(content, where))
        elif role == "system":
            texts = [_text_of(block, f"{where}[{place}]") for place, block in enumerate(content)]
            messages.append({"role": role, "content": "\n".join(texts)})
        else:
            messages += _asked(content, where)
    return messages


def _answer(blocks: Sequence[Item], where: str) -> Item:
    """Returns an assistant's turn as one message with its text and its tool calls."""
    texts: list[str] = []
    calls: list[Item] = []
    for place, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                texts.append(_text_of(block, f"{where}[{place}]"))
            case "tool_use":
                if not isinstance(block.get("input"), dict):
                    raise invalid(f"{where}[{place}].input: it must be an object.", param=f"{where}[{place}].input")
                arguments = json.dumps(block["input"], ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case kind if kind not in _THOUGHTS:
                raise _unreadable(kind, f"{where}[{place}]")
    message: Item = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    return {**message, "tool_calls": calls} if calls else message


def _asked(blocks: Sequence[Item], where: str) -> list[Item]:
    """Returns a user's turn as messages: one for each tool result, then one with the user's own text and all images."""
    results: list[Item] = []
    parts: list[Item] = []
    for place, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            parts.append(_part(block, f"{where}[{place}]"))
            continue
        found = _parts(block.get("content") or "", f"{where}[{place}].content")
        text = "".join(part["text"] for part in found if part["type"] == "text")
        results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        parts += [part for part in found if part["type"] != "text"]  # templates show images in a user's turn alone
    if not parts and results:
        return results
    if all(part["type"] == "text" for part in parts):
        return [*results, {"role": "user", "content": "\n".join(part["text"] for part in parts)}]
    return [*results, {"role": "user", "content": parts}]


def _parts(content: Any, where: str) -> list[Item]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(f"{where}: it must be a text or a list of blocks.", param=where)
    return [_part(block, f"{where}[{place}]") for place, block in enumerate(content)]


def _part(block: Item, where: str) -> Item:
    """Returns a block with a text or an image as a part of a chat's message."""
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return {"type": "text", "text": _text_of(block, where)}
    if kind == "image" and isinstance(source, dict):
        match source.get("type"):
            case "base64":
                return _image(f"data:{source.get('media_type')};base64,{source.get('data')}")
            case "url" if isinstance(source.get("url"), str):
                return _image(source["url"])
        raise invalid(f"{where}.source: an image is base64 or a URL.", param=f"{where}.source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        title = f"{block['title']}\n" if isinstance(block.get("title"), str) else ""
        return {"type": "text", "text": f"{title}{source.get('data')}"}
    raise _unreadable(kind, where)


def _image(url: str) -> Item:
    return {"type": "image_url", "image_url": {"url": url}}


def _text_of(block: Item, where: str) -> str:
    text = block.get("text")
    if block.get("type") != "text" or not isinstance(text, str):
        raise _unreadable(block.get("type"), where)
    return text


def _unreadable(kind: Any, where: str) -> Exception:
    return invalid(f"{where}: blocks of type {kind!r} are not read here.", param=where)
