"""Builds the turns of a chat in the form that the chat template expects. If the template does not support tools, the
tools and tool calls become text. Also checks a request's template variables. If the model is to continue the last
message, cuts the rendered prompt at the end of this message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from raytide.actors.engine.types import ChatFormat, Message
from raytide.actors.models.chat_template import ChatTemplate
from raytide.core.errors import UsageError

_RESERVED = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"),
        *("cycler", "dict", "joiner", "lipsum", "namespace", "raise_exception", "range", "strftime_now"),
    }
)
"""Template variables that a request sets through other fields, or may not set."""

_MARKS: tuple[tuple[str, str], ...] = (
    ("<｜tool▁call", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<parameter=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": ', "llama3"),
)
"""Texts by which a template's tool call format is recognized; the first match decides."""

_END = "\uf8ff"
"""Marks the end of a message in a rendered conversation. No template treats this private-use character specially."""

_INSTRUCTIONS = """\
You may call one or more functions. You are given their signatures within <tools></tools>:
<tools>
{tools}
</tools>
For each call answer with a JSON object of the function's name and its arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""
"""The tool prompt for models without one in their template: the form that Hermes and Qwen were trained on."""


def format_of(template: ChatTemplate) -> ChatFormat:
    """Returns the format of the outputs of a model with this template."""
    name = next((name for mark, name in _MARKS if mark in template.source), "") if template.knows_tools else ""
    reasoning = ""
    if "<think>" in template.source or "</think>" in template.source:
        try:
            prompt = template.render([{"role": "user", "content": "x"}], prompt=True)
        except UsageError:
            prompt = ""
        reasoning = "open" if prompt.rstrip().endswith("<think>") else "tagged"
    return ChatFormat(tools=name, reasoning=reasoning)  # type: ignore[arg-type]  # names of _MARKS


def turns_of(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    knows_tools: bool,
    takes_system: bool = True,
    takes_one_call: bool = False,
    id_length: int | None = None,
) -> list[dict[str, object]]:
    """Returns the turns of a chat for a template. If the template does not support tools, the tools, tool calls and
    results become text; without `takes_system`, the tools go into the first turn, if it is the user's. Ids of calls
    are replaced if the template requires `id_length` letters and digits. With `takes_one_call`, several calls in a
    turn become several turns, each with its result.
    """
    if knows_tools:
        messages = _one_call_each(messages) if takes_one_call else messages
        return [_turn(message, id_length) for message in messages]
    turns = _plain_turns(messages)
    if not tools:
        return turns
    shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = _INSTRUCTIONS.format(tools=shown)
    if turns[0]["role"] == "system":
        return [{"role": "system", "content": f"{turns[0]['content']}\n\n{told}"}, *turns[1:]]
    if not takes_system and turns[0]["role"] == "user":
        return [{"role": "user", "content": _joined(told, turns[0]["content"], "\n\n")}, *turns[1:]]
    return [{"role": "system", "content": told}, *turns]


def checked_variables(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template variables that a request sets. Raises UsageError for a variable that a request may not
    set.
    """
    if taken := sorted(_RESERVED & kwargs.keys()):
        raise UsageError(
            f"chat_template_kwargs cannot set {taken[0]}.", hint="Set only variables that the model's template defines."
        )
    return dict(kwargs)


def left_open(rendered: Callable[[list[dict[str, object]]], str], turns: list[dict[str, object]], last: Message) -> str:
    """Returns the rendered conversation up to the end of its last message, so that the model continues this message.

    A second rendering with a mark behind the message shows where the message ends. Raises UsageError if the last
    message is not an assistant's text, or if the template changes the text.
    """
    content = turns[-1]["content"]
    if last.role != "assistant" or not isinstance(content, str) or not content.strip() or last.tool_calls:
        raise UsageError(
            "continue_final_message needs a last message of the assistant with text and without calls.",
            hint="Add the beginning of the answer as the last message, or leave the field out.",
        )
    text = rendered(turns)
    shown, _, _ = rendered([*turns[:-1], {**turns[-1], "content": content + _END}]).rpartition(_END)
    for open_text in (shown, shown.rstrip()):  # many templates strip a message: as much of it is kept as is shown
        if open_text.rstrip().endswith(content.strip()) and text.startswith(open_text):
            return open_text
    raise UsageError(
        "the chat template does not show the last message as it is, so that it cannot be continued.",
        hint="Leave continue_final_message out.",
    )


def _turn(message: Message, id_length: int | None) -> dict[str, object]:
    turn: dict[str, object] = {"role": message.role, "content": _content(message)}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": _short(call.id, id_length),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = _short(message.tool_call_id, id_length)
    if message.name:
        turn["name"] = message.name
    return turn


def _short(call_id: str, length: int | None) -> str:
    """Returns a call's id in the form that the template takes: equal ids become equal ones."""
    if length is None or (len(call_id) == length and call_id.isalnum()):
        return call_id
    return blake2b(call_id.encode(errors="backslashreplace")).hexdigest()[:length]


def _content(message: Message) -> object:
    if not message.parts:
        return message.content
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in message.parts]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        if len(message.tool_calls) < 2:
            found.append(message)
            continue
        results: dict[str, list[Message]] = {}
        while place < len(messages) and messages[place].role == "tool":
            results.setdefault(messages[place].tool_call_id, []).append(messages[place])
            place += 1
        for index, call in enumerate(message.tool_calls):
            content = "" if index else message.content
            found += [replace(message, content=content, tool_calls=(call,)), *results.pop(call.id, ())]
        found += [each for rest in results.values() for each in rest]
    return found


def _plain_turns(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Returns a chat's turns with calls and their results as text. Adjacent results and the user's text after them form
    one turn, because many templates refuse two user turns in a row.
    """
    turns: list[dict[str, object]] = []
    results: list[str] = []
    for message in messages:
        turn = _plain(message)
        if message.role == "tool":
            results.append(str(turn["content"]))
            continue
        if results and turn["role"] == "user":
            turn["content"] = _joined("\n".join(results), turn["content"], "\n")
        elif results:
            turns.append({"role": "user", "content": "\n".join(results)})
        results = []
        turns.append(turn)
    return [*turns, {"role": "user", "content": "\n".join(results)}] if results else turns


def _joined(text: str, content: object, between: str) -> object:
    """Puts a text before the content of a turn, which is a text or a list of parts."""
    return (
        [{"type": "text", "text": text + between}, *content]
        if isinstance(content, list)
        else f"{text}{between}{content}"
    )


def _plain(message: Message) -> dict[str, object]:
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
    if not message.tool_calls:
        return {"role": message.role, "content": _content(message)}
    calls = "\n".join(
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': _arguments(call.arguments)})}\n</tool_call>"
        for call in message.tool_calls
    )
    return {"role": message.role, "content": "\n".join(part for part in (message.content, calls) if part)}


def _arguments(text: str) -> object:
    """Returns a call's arguments as the object that templates expect; as a text if they are not valid JSON. Empty
    text, which clients send for a call without arguments, becomes {}.
    """
    if not text.strip():
        return {}
    try:
        return json.loads(text)
    except ValueError:
        return text
