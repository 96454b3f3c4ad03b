"""The turns of a conversation in the Messages API, block by block, as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from raytide.actors.serving.openai_api.errors import invalid

Item = dict[str, Any]
Content = str | Sequence[Item]

_BILLING = "x-anthropic-billing-header"
"""The beginning of a system text in which Claude Code has a hash of each request: no prefix would ever be cached."""
_THOUGHTS = ("thinking", "redacted_thinking")
"""Blocks of an earlier answer's reasoning, which templates leave out of later prompts."""


def system_text(system: Content | None) -> str:
    """Returns the text of a system prompt."""
    if isinstance(system, str) or system is None:
        return system or ""
    texts = [_text_of(block, f"system[{place}]") for place, block in enumerate(system)]
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


def turns_of(turns: Iterable[tuple[str, Content]]) -> list[Item]:
    """Returns the messages of a chat. Raises ApiError (400), with its place, for a block that cannot be read."""
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
    """Returns the message of an assistant's turn: its text and its calls."""
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
    """Returns the messages of a user's turn: one for each result of a tool, then what the user says."""
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
    """Returns a text or an image as a part of a chat's message."""
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
