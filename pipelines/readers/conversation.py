"""Renders conversations and preference pairs to the text on which a model is trained.

The format is ChatML, as in the chat template that a trained tokenizer gets (`bpe.CHAT_TEMPLATE`). A message is
`<|im_start|>ROLE`, a line break, its content, `<|im_end|>` and a line break. A preference pair is rendered as its
prompt and its chosen answer. The rejected answer is left out. If the prompt is a plain text, it becomes a message of
the user. If the chosen answer is a plain text, it becomes a message of the assistant. If either is a list of
messages, the roles in the list are used.

In the rendered text, one Unicode noncharacter stands for `<|im_start|>` and another for `<|im_end|>`. The encoder
turns these noncharacters into the special tokens. If a message itself spells out `<|im_start|>`, these characters
stay ordinary text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytide.core.specs.data import RecordKind
from raytide.pipelines.readers.base import Drop, Record

TURN_START_MARK, TURN_END_MARK = "\ufdd0", "\ufdd1"
_UNMARKED = str.maketrans(dict.fromkeys((TURN_START_MARK, TURN_END_MARK), "\ufffd"))


def text_of(value: object) -> Record:
    """Returns a text value as a record. Returns a Drop if the value is not a text that UTF-8 can encode."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        return Drop("no_text", "" if value is None else f"a {type(value).__name__} where a text belongs")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        return Drop("not_utf8", str(error))


def record_of(row: Mapping[str, Any], column: str, kind: RecordKind) -> Record:
    """Returns the record in a row of named values.

    It is the text in `column`, or a rendered conversation, or a rendered preference pair.
    """
    if kind == "text":
        return text_of(row.get(column))
    try:
        messages = _messages(row.get("messages")) if kind == "messages" else _preferred(row)
    except ValueError as error:
        return Drop("not_conversation", str(error))
    return text_of("".join(map(_rendered, messages)))


def _rendered(message: tuple[str, str]) -> str:
    role, content = (part.translate(_UNMARKED) for part in message)
    return f"{TURN_START_MARK}{role}\n{content}{TURN_END_MARK}\n"


def _messages(value: object) -> list[tuple[str, str]]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("no list of messages")
    messages = []
    for i, message in enumerate(value):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role or "\n" in role or not isinstance(content, str):
            raise ValueError(f"message {i} is not a role and a content")
        messages.append((role, content))
    return messages


def _preferred(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    if row.get("rejected") is None:
        raise ValueError("no rejected answer")
    prompt, chosen = _turns(row.get("prompt"), "user", "prompt"), _turns(row.get("chosen"), "assistant", "chosen")
    return chosen if chosen[: len(prompt)] == prompt else prompt + chosen


def _turns(value: object, role: str, what: str) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [(role, value)]
    try:
        return _messages(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
