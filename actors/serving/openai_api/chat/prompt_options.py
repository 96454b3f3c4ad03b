"""A chat request's options of its prompt, and what they mean for reading the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from raytide.actors.engine.base import Engine
from raytide.actors.engine.types import Message, PromptOptions
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.wire import ChatRequest

_TAIL_TOKENS = 16
"""More than the tokens of an opening reasoning tag at a prompt's end."""
_OPENING, _CLOSING = "<think>", "</think>"


def prompt_options(request: ChatRequest) -> PromptOptions:
    """Returns the options of a request. Raises ApiError (400) for fields that exclude each other, as vLLM does."""
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
            )
        return PromptOptions(kwargs, "open")
    return PromptOptions(kwargs, "closed" if request.add_generation_prompt is False else "answer")


async def reasoning_after(
    engine: Engine, prompt: Sequence[int], last: Message, options: PromptOptions
) -> Literal["", "tagged", "open"]:
    """Returns how the answer to this prompt may begin: the format that an engine states holds for plain prompts only.
    A template may open or close the reasoning itself, as its variables tell it; a continued message has begun."""
    if options.ending == "open":
        return "open" if last.content.count(_OPENING) > last.content.count(_CLOSING) else ""
    (tail,) = await engine.decode([prompt[-_TAIL_TOKENS:]])
    return "open" if tail.rstrip().endswith(_OPENING) else "tagged"
