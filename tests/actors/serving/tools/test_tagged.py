"""Calls that a model writes in tags, cut anywhere, with arguments of the types that the tools' schemas give."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.actors.serving.tools.test_parser import parsed

from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import ChatFormat
from raytide.actors.serving.openai_api.answers.bodies import Usage
from raytide.actors.serving.openai_api.answers.writer import ChatWriter, ChoiceState
from raytide.actors.serving.openai_api.chat.tool_choice import ToolUse, tool_use_of
from raytide.actors.serving.openai_api.wire import ChatRequest
from raytide.actors.serving.tools.parser import OutputParser, syntax_of
from raytide.actors.serving.tools.tagged import TaggedArguments

PROPERTIES = {
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer"},
    "ratio": {"type": ["number", "null"]},
    "deep": {"type": "boolean"},
    "unit": {"enum": ["C", "F"]},
    "options": {"$ref": "#/$defs/Options"},
    "days": {"anyOf": [{"type": "array"}, {"type": "null"}]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"Options": {"type": "object"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
CALL = """\
I look.
<tool_call>
<function=f>
<parameter=text>
if a < b:
    print("x</p>")

</parameter>
<parameter=count>
12
</parameter>
</function>
</tool_call>"""
ARGUMENTS = {"text": 'if a < b:\n    print("x</p>")\n', "count": 12}


def use() -> ToolUse:
    fields = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
    return tool_use_of(ChatRequest.model_validate(fields), ChatFormat("qwen3_coder"))


def parser() -> OutputParser:
    made = use().parser()
    assert made is not None
    return made


CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    (CALL, "I look.", [("f", json.dumps(ARGUMENTS))]),
    (
        f"{CALL}\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "I look.",
        [("f", json.dumps(ARGUMENTS)), ("g", "{}")],
    ),
    ("<function=g>\n<parameter=x>\nnull\n</parameter>\n</function>\n</tool_call>", "", [("g", '{"x": null}')]),
    ("<tool_call><function=h><parameter=a>1</parameter></function> done", "done", [("h", '{"a": "1"}')]),
    ("<tool_call><function=f><parameter=text>null and\n<parameter=count>2", "", [
        ("f", '{"text": "null and", "count": 2}')
    ]),
    ("<tool_call>\n<function=f>\nfirst <b <parameter=text></tool_call>", "", [("f", '{"text": ""}')]),
    ("The tags are <tool_call> and <function=NAME>, 1 < 2", "The tags are <tool_call> and <function=NAME>, 1 < 2", []),
    ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
]  # fmt: skip


@pytest.mark.parametrize(("output", "text", "calls"), CASES)
def test_tagged_calls_are_read_alike_however_they_are_cut(output: str, text: str, calls: list[tuple[str, str]]) -> None:
    @given(st.lists(st.integers(0, len(output)), max_size=8))
    def cut(places: list[int]) -> None:
        bounds = [0, *sorted(places), len(output)]
        assert parsed(parser(), [output[a:b] for a, b in pairwise(bounds)]) == ("", text, calls)

    cut()
    assert parsed(parser(), list(output)) == ("", text, calls)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("text", "12", "12"),
        ("text", "null", None),
        ("maybe", "12", "12"),
        ("count", "007", 7),
        ("count", "many", "many"),
        ("ratio", "2.5", 2.5),
        ("ratio", "NaN", "NaN"),
        ("deep", "True", True),
        ("deep", "FALSE", False),
        ("deep", "perhaps", "perhaps"),
        ("unit", "12", "12"),
        ("options", '{"a": [1]}', {"a": [1]}),
        ("options", "{'a': True}", {"a": True}),
        ("options", "[" * 5000, "[" * 5000),
        ("days", '["Mon"]', ["Mon"]),
        ("days", '["\\ud83d"]', ["\ud83d"]),
        ("unknown", "1", "1"),
    ],
)
def test_the_schema_gives_an_argument_its_type(name: str, value: str, expected: object) -> None:
    output = f"<tool_call>\n<function=f>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    _, _, ((_, arguments),) = parsed(parser(), [output])
    arguments.encode()
    assert json.loads(arguments) == {name: expected}


def test_a_schema_that_refers_to_itself_is_read_once() -> None:
    definitions = {name: {"anyOf": [{"$ref": f"#/$defs/{to}"}] * 50} for name, to in ("ab", "bc", "ca")}
    schema = {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": definitions}
    assert TaggedArguments(schema).feed("<parameter=x>1</parameter></function>", is_end=True)[0] == '{"x": "1"}'


def test_text_arguments_arrive_while_the_model_writes_them() -> None:
    reader = parser()
    reader.feed("<tool_call>\n<function=f>\n<parameter=text>\nfirst line\n")
    for text, expected in (("second", "\\nsecond"), (" third", " third")):
        assert [piece.call.arguments for piece in reader.feed(text) if piece.call is not None] == [expected]


def test_arguments_that_the_length_limit_cuts_are_not_closed() -> None:
    reader = parser()
    pieces = reader.feed(CALL[: CALL.index("</p>")]) + reader.finish(is_cut=True)
    arguments = "".join(piece.call.arguments for piece in pieces if piece.call is not None)
    assert arguments == json.dumps(ARGUMENTS)[: len(arguments)]
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


def test_a_long_value_is_searched_once() -> None:
    reader = OutputParser(syntax_of("qwen3_coder"), schemas={"f": SCHEMA})
    reader.feed("<tool_call><function=f><parameter=days>")
    assert reader._tagged is not None
    for count in range(1, 2001):
        reader.feed("[")
        assert reader._tagged._searched == count


def test_a_chat_has_the_call_with_its_types() -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
    body = ChatRequest.model_validate(fields)
    generation: Any = SimpleNamespace(tool_use=use(), sampling=SamplingParams())
    choice, usage = ChoiceState(), Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
    choice.text = CALL
    (answer,) = ChatWriter(body, generation).full_response([choice], usage, lambda token: b"").choices
    (call,) = answer.message.tool_calls or ()
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", "I look.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", ARGUMENTS)
