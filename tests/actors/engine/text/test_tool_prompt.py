"""Tools in prompts, by templates that know tools and by others."""

from __future__ import annotations

import json
import re

import pytest

from raytide.actors.engine.text.tool_prompt import format_of, turns_of
from raytide.actors.engine.types import ChatFormat, Message, ToolCallTurn
from raytide.actors.models.chat_template import ChatTemplate

QWEN = """\
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
within <tool_call></tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MISTRAL = """\
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- macro checked(id) %}{{ id }}{% endmacro %}
{%- for m in messages %}
  {%- if m.role == "user" and tools is not none %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
  {%- if m.tool_calls is defined %}
    {%- for tool_call in m.tool_calls %}[TOOL_CALLS] {{ tool_call.function | tojson }}
      {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
        {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
      {%- endif %}
      {{- ', "id": "' + tool_call.id + '"}' }}
    {%- endfor %}
  {%- elif m.role == "tool" %}
    {%- if not m.tool_call_id is defined or m.tool_call_id|length != 9 %}
      {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
    {%- endif %}
    {{- '"call_id": "' + m.tool_call_id + '"' }}
  {%- endif %}
{%- endfor %}"""
PHI4_MINI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HISTORY = [
    Message("user", "?"),
    Message("assistant", "", tool_calls=(ToolCallTurn("call_1", "f", '{"a": 1}'),)),
    Message("tool", "rain", tool_call_id="call_1"),
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (QWEN, ChatFormat("hermes")),
        (PLAIN, ChatFormat()),
        (f"{QWEN}{{# <think> #}}", ChatFormat("hermes", "tagged")),
        (f"{QWEN}<think>\n", ChatFormat("hermes", "open")),
        ("{{ tools }}<tool_call>\n<function=NAME>\n<parameter=KEY>", ChatFormat("qwen3_coder")),
        ("{{ tools }}[TOOL_CALLS]", ChatFormat("mistral")),
        ("{{ tools }}<|python_tag|>", ChatFormat("llama3")),
        ("{{ tools }}<｜tool▁call▁begin｜>", ChatFormat("deepseek")),
        ("{% raw %}<tool_call>{% endraw %}", ChatFormat()),
    ],
)
def test_the_template_shows_how_outputs_are_read(source: str, expected: ChatFormat) -> None:
    assert format_of(ChatTemplate(source, {})) == expected


def test_a_template_that_knows_tools_gets_them_and_calls_as_objects() -> None:
    template = ChatTemplate(QWEN, {})
    turns = turns_of(HISTORY, [TOOL], knows_tools=template.knows_tools)
    text = template.render(turns, prompt=True, tools=[TOOL])
    assert json.dumps(TOOL) in text
    assert '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' in text
    assert text.endswith("tool\nrain<|im_end|>\n<|im_start|>assistant\n")


def test_another_template_gets_them_as_text() -> None:
    template = ChatTemplate(PLAIN, {})
    turns = turns_of([Message("system", "Be kind."), *HISTORY], [TOOL], knows_tools=template.knows_tools)
    system, question, call, result = template.render(turns, prompt=True).split("\nuser: ")[0], *turns[1:]
    assert system.startswith("system: Be kind.\n\nYou may call one or more functions.")
    assert json.dumps(TOOL) in system
    assert question == {"role": "user", "content": "?"}
    assert call["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\nrain\n</tool_response>"}


GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<' + m['role'] + '>' + m['content'] | trim + '</>' }}{% endfor %}"
)


def test_a_template_that_takes_no_system_message_gets_tools_before_the_first_question() -> None:
    template = ChatTemplate(GEMMA, {})
    calls = tuple(ToolCallTurn(name, "f", "") for name in "ab")
    results = [Message("tool", "rain", tool_call_id="a"), Message("tool", "sun", tool_call_id="b")]
    messages = [HISTORY[0], Message("assistant", "", tool_calls=calls), *results, Message("user", "So?")]
    turns = turns_of(messages, [TOOL], knows_tools=template.knows_tools, takes_system=template.takes_system)
    text = template.render(turns, prompt=True, tools=[TOOL])
    assert text.startswith("<user>You may call one or more functions.")
    assert json.dumps(TOOL) in text.partition("</tool_call>\n\n?</><assistant>")[0]
    assert text.count('{"name": "f", "arguments": {}}') == 2
    told = "<tool_response>\n{}\n</tool_response>".format
    assert text.endswith(f"<user>{told('rain')}\n{told('sun')}\nSo?</>")
    assert template.takes_system is False
    assert ChatTemplate(PLAIN, {}).takes_system is True


LLAMA = (
    "{{ tools }}{% for m in messages %}{% if 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<call>{{ m.tool_calls[0].id }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


def test_several_calls_become_several_turns_if_the_template_takes_one() -> None:
    template = ChatTemplate(LLAMA, {})
    assert template.takes_one_call is True
    assert not ChatTemplate(QWEN, {}).takes_one_call and not ChatTemplate(MISTRAL, {}).takes_one_call
    calls = tuple(ToolCallTurn(name, "f", "{}") for name in "abc")
    results = [Message("tool", f"of {name}", tool_call_id=name) for name in "bca"]
    messages = [HISTORY[0], Message("assistant", "", tool_calls=calls), *results, Message("user", "So?")]
    turns = turns_of(messages, [TOOL], knows_tools=True, takes_one_call=True)
    text = template.render(turns, prompt=True)
    assert text == "None<user>?<call>a<tool>of a<call>b<tool>of b<call>c<tool>of c<user>So?"


def test_a_call_without_arguments_has_an_empty_object() -> None:
    call = Message("assistant", "", tool_calls=(ToolCallTurn("call_1", "f", ""),))
    (turn,) = turns_of([call], [TOOL], knows_tools=True)
    (shown,) = turn["tool_calls"]  # type: ignore[misc]
    assert shown["function"] == {"name": "f", "arguments": {}}


def test_ids_of_calls_fit_the_template_and_results_keep_their_call() -> None:
    template = ChatTemplate(MISTRAL, {})

    def shown(call_id: str) -> list[str]:
        call = Message("assistant", "", tool_calls=(ToolCallTurn(call_id, "f", '{"a": 1}'),))
        turns = turns_of(
            [HISTORY[0], call, Message("tool", "rain", tool_call_id=call_id)],
            [TOOL],
            knows_tools=template.knows_tools,
            id_length=template.id_length,
        )
        text = template.render(turns, prompt=True, tools=[TOOL])
        assert "[AVAILABLE_TOOLS]" in text
        return re.findall(r'id": "(.*?)"', text)

    assert shown("aB3dE6gH9") == ["aB3dE6gH9"] * 2
    for given in ("call_0123456789abcdef01234567", "call_1", "call_0123", "é" * 40):
        call, result = shown(given)
        assert call == result
        assert re.fullmatch("[a-z0-9]{9}", call)
    assert shown("call_1") != shown("call_2")
    assert ChatTemplate(QWEN, {}).id_length is None


def test_templates_write_json_with_the_options_of_transformers() -> None:
    def written(options: str) -> str:
        return ChatTemplate(f"{{{{ messages[0].content | tojson{options} }}}}", {}).render(
            [{"content": {"b": "é", "a": 1}}], prompt=False
        )

    assert written("(ensure_ascii=False)") == written("") == '{"b": "é", "a": 1}'
    assert written("(True, none, (',', ':'))") == r'{"b":"\u00e9","a":1}'
    assert written("(sort_keys=true)") == '{"a": 1, "b": "é"}'


def test_a_template_that_only_names_tools_gets_them_as_text() -> None:
    template = ChatTemplate(PHI4_MINI, {})
    turns = turns_of(HISTORY, [TOOL], knows_tools=template.knows_tools, id_length=template.id_length)
    text = template.render(turns, prompt=True, tools=[TOOL])
    assert json.dumps(TOOL) in text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text


def test_a_chat_without_tools_is_as_it_was() -> None:
    messages = [Message("system", "s"), Message("user", "u")]
    for knows in (True, False):
        assert turns_of(messages, (), knows_tools=knows) == [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
        ]
