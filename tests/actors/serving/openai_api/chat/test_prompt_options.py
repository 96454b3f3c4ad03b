"""`chat_template_kwargs` and `continue_final_message` over HTTP, and how an answer after them is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import OpenAI

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.types import PLAIN_PROMPT, ChatFormat, EngineInfo, Message, PromptOptions
from raytide.actors.models.chat_template import ChatTemplate

TEMPLATE = """\
{% for m in messages %}{{ m.role }}:{{ m.content }}
{% endfor %}
{%- if add_generation_prompt %}assistant:{{ "" if enable_thinking is false else "<think>" }}{% endif %}"""


class _Thinker(FakeEngine):
    """Its template opens the reasoning, unless it is told not to. The reply is what follows the prompt."""

    prompt = ""

    async def start(self) -> EngineInfo:
        return replace(await super().start(), chat=ChatFormat(reasoning="open"))

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: PromptOptions = PLAIN_PROMPT,
    ) -> list[int]:
        turns = [{"role": each.role, "content": each.content} for each in messages]
        kwargs = {"enable_thinking": True, **options.template_kwargs}
        text = ChatTemplate(TEMPLATE, {}).render(turns, prompt=options.ending == "answer", variables=kwargs)
        self.prompt = text.rstrip("\n") if options.ending == "open" else text
        return list(self.prompt.encode())

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(prompt).decode() for prompt in prompts]


class Asked:
    """A model whose replies are given, and what it is asked."""

    def __init__(self, reply: str, serve: Callable[..., str], client_of: Callable[[str], OpenAI]) -> None:
        self.engine = _Thinker(reply=reply)
        self._client = client_of(serve(self.engine))

    def __call__(self, *messages: Any, **extra: Any) -> Any:
        turns = messages or ({"role": "user", "content": "hello"},)
        return (
            self._client.chat.completions.create(
                model="fake", messages=list(turns), max_tokens=len(self.engine._reply), extra_body=extra
            )
            .choices[0]
            .message
        )


@pytest.fixture
def model(serve: Callable[..., str], client_of: Callable[[str], OpenAI]) -> Callable[[str], Asked]:
    return lambda reply: Asked(reply, serve, client_of)


def test_reasoning_that_the_template_opens_is_read_and_what_it_leaves_out_is_not(
    model: Callable[[str], Asked],
) -> None:
    thinks = model("because</think>yes")
    plain = thinks()
    assert (plain.content, plain.reasoning_content) == ("yes", "because")
    answers = model("yes")
    quiet = answers(chat_template_kwargs={"enable_thinking": False})
    assert answers.engine.prompt.endswith("assistant:")
    assert (quiet.content, getattr(quiet, "reasoning_content", None)) == ("yes", None)
    other = thinks(chat_template_kwargs={"unknown": 1})
    assert (other.content, other.reasoning_content) == ("yes", "because")


def test_a_message_is_continued_within_its_reasoning_or_after_it(model: Callable[[str], Asked]) -> None:
    begun = {"role": "assistant", "content": "<think>I am"}
    thinks = model(" sure</think>yes")
    within = thinks({"role": "user", "content": "?"}, begun, continue_final_message=True, add_generation_prompt=False)
    assert thinks.engine.prompt.endswith("assistant:<think>I am")
    assert (within.content, within.reasoning_content) == ("yes", " sure")
    after = model(" yes")({"role": "user", "content": "?"}, {**begun, "content": "I say"}, continue_final_message=True)
    assert after.content == " yes"


def test_the_effort_is_a_variable_of_the_template(model: Callable[[str], Asked]) -> None:
    asked = model("because</think>yes")
    seen: list[PromptOptions] = []
    render = asked.engine.chat_prompt

    async def record(messages: Any, tools: Any = (), options: PromptOptions = PLAIN_PROMPT) -> list[int]:
        seen.append(options)
        return await render(messages, tools, options)

    asked.engine.chat_prompt = record  # type: ignore[method-assign]
    assert asked(reasoning_effort="low").content == "yes"
    assert asked(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}).content == "yes"
    assert [each.template_kwargs["reasoning_effort"] for each in seen] == ["low", "high"]


def test_fields_that_exclude_each_other_and_too_many_variables_are_refused(model: Callable[[str], Asked]) -> None:
    asked = model("yes")
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        asked(continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        asked(chat_template_kwargs={f"v{place}": place for place in range(33)})
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        asked(chat_template_kwargs="thinking")
