"""Chat messages of the wire as the engine's `Message`s. The engine itself renders the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence

from raytide.actors.engine.types import Message
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.wire import ChatMessage

__all__ = ["messages_of"]


def messages_of(messages: Sequence[ChatMessage]) -> list[Message]:
    """Text parts are joined; a part that is not text is refused by name. "developer" is OpenAI's newer "system"."""
    return [
        Message("system" if message.role == "developer" else message.role, _text(message, index))
        for index, message in enumerate(messages)
    ]


def _text(message: ChatMessage, index: int) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise invalid(f"messages[{index}].content is missing.", param=f"messages[{index}].content")
        return ""
    if isinstance(message.content, str):
        return message.content
    for place, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            where = f"messages[{index}].content[{place}]"
            raise invalid(f"{where}: this model reads text parts only, not {part.type!r}.", param=where)
    return "".join(part.text or "" for part in message.content)
