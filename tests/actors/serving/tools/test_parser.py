"""Outputs of models, cut anywhere: reasoning, text and calls come out the same."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.serving.tools.json_scanner import JsonScanner
from raytide.actors.serving.tools.parser import OutputParser, Piece, ToolSyntax, syntax_of

Reasoning = Literal["", "tagged", "open"]
DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
CASES: list[tuple[str, Reasoning, str, tuple[str, str, list[tuple[str, str]]]]] = [
    ("hermes", "", "plain text, no call", ("", "plain text, no call", [])),
    (
        "hermes",
        "",
        'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": "}{\\"", "b": [1,2]}}\n</tool_call>',
        ("", "Let me look.", [("f", '{"a": "}{\\"", "b": [1,2]}')]),
    ),
    (
        "hermes",
        "",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>{"arguments": [1], "name": "g"}',
        ("", "", [("f", "{}"), ("g", "[1]")]),
    ),
    (
        "hermes",
        "",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("f", '{"a": 1}')]),
    ),
    (
        "hermes",
        "",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "}"}</tool_call> done',
        ("", "done", [("f", '{"a": 1}')]),
    ),
    (
        "hermes",
        "",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_',
        ("", "", [("f", '{"a": 1}')]),
    ),
    ("hermes", "", "a < b and <tool but no", ("", "a < b and <tool but no", [])),
    ("hermes", "", '<tool_call>{"name": "f", "argum', ("", '<tool_call>{"name": "f", "argum', [])),
    ("hermes", "", "<tool_call>{not json}</tool_call>", ("", "<tool_call>{not json}</tool_call>", [])),
    (
        "hermes",
        "",
        '<tool_call>{"name": "get\\_f", "arguments": {}}</tool_call>',
        ("", '<tool_call>{"name": "get\\_f", "arguments": {}}</tool_call>', []),
    ),
    (
        "hermes",
        "",
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
        ("", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', []),
    ),
    (
        "hermes",
        "",
        '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "\\u0066"}</tool_call>',
        ("", "", [("f", '{"a": "\\ud83d"}')]),
    ),
    (
        "hermes",
        "",
        '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ("", '<tool_call>{"name": "f"}</tool_call>', [("g", "{}")]),
    ),
    (
        "hermes",
        "",
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {}}',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    ("llama3", "", '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    (
        "llama3",
        "",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    ("llama3", "", '{"type": "function", "name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    ("llama3", "", '{"no": "call"} at all', ("", '{"no": "call"} at all', [])),
    (
        "mistral",
        "",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": []}}]',
        ("", "", [("f", '{"a": 1}'), ("g", '{"b": []}')]),
    ),
    ("mistral", "", '[{"name": "f", "arguments": {"a": 1}}]', ("", "", [("f", '{"a": 1}')])),
    ("mistral", "", "[1, 2] is a list", ("", "[1, 2] is a list", [])),
    (
        "deepseek",
        "",
        f"Ok.<｜tool▁calls▁begin｜>{DEEPSEEK.format('f', '{}')}\n{DEEPSEEK.format('g', '[1]')}<｜tool▁calls▁end｜>",
        ("", "Ok.", [("f", "{}"), ("g", "[1]")]),
    ),
    ("hermes", "tagged", "<think>\nhm\n</think>\n\nYes", ("\nhm\n", "Yes", [])),
    ("hermes", "open", 'hm</think>\n<tool_call>{"name":"f","arguments":{}}</tool_call>', ("hm", "", [("f", "{}")])),
    ("hermes", "open", "never ends", ("never ends", "", [])),
    ("hermes", "tagged", "no thoughts", ("", "no thoughts", [])),
    ("mistral", "", '[{"a": 1}, {"b": 2}]', ("", '[{"a": 1}, {"b": 2}]', [])),
    ("mistral", "", '[TOOL_CALLS][{"name": "f", "arguments": {}}', ("", "", [("f", "{}")])),
    ("mistral", "", '[{"name": "f", "arguments": {}},', ("", "", [("f", "{}")])),
]


def read(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: dict[int, list[str]] = {}
    for call in (piece.call for piece in pieces if piece.call is not None):
        assert (call.index in calls) is not bool(call.id), "the first piece of a call, and it alone, has the id"
        found = calls.setdefault(call.index, ["", ""])
        found[0] += call.name
        found[1] += call.arguments
    reasoning, text = "".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces)
    return reasoning, text, [(name, arguments) for name, arguments in calls.values()]


def parsed(parser: OutputParser, parts: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    return read([piece for part in parts for piece in parser.feed(part)] + parser.finish())


@pytest.mark.parametrize(("chat_format", "reasoning", "output", "expected"), CASES)
def test_an_output_is_read_alike_however_it_is_cut(
    chat_format: str, reasoning: Reasoning, output: str, expected: object
) -> None:
    @given(st.lists(st.integers(0, len(output)), max_size=8))
    def cut(places: list[int]) -> None:
        bounds = [0, *sorted(places), len(output)]
        parts = [output[a:b] for a, b in pairwise(bounds)]
        assert parsed(OutputParser(syntax_of(chat_format), reasoning), parts) == expected

    cut()
    assert parsed(OutputParser(syntax_of(chat_format), reasoning), list(output)) == expected


def test_without_tools_nothing_is_a_call() -> None:
    output = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed(OutputParser(None), list(output)) == ("", output, [])


def test_a_call_that_is_nested_too_deeply_to_be_read_is_text() -> None:
    output = f'<tool_call>{{"arguments": {"[" * 2000}{"]" * 2000}, "name": "f"}}</tool_call>'
    assert parsed(OutputParser(syntax_of("hermes")), [output]) == ("", output, [])


def test_calls_beyond_the_allowed_number_are_dropped() -> None:
    output = "".join(f'<tool_call>{{"name": "f{n}", "arguments": {{}}}}</tool_call>' for n in range(3))
    assert parsed(OutputParser(syntax_of("hermes"), max_calls=1), list(output)) == ("", "", [("f0", "{}")])


@pytest.mark.parametrize(
    ("syntax", "output", "first"),
    [
        (syntax_of("hermes"), '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"', 55),
        (syntax_of("llama3"), '{"name": "f", "parameters": {}}; {"name": "g"', 33),
        (syntax_of("mistral"), '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"', 45),
        (syntax_of("deepseek"), f"{DEEPSEEK.format('f', '{}')}\n{DEEPSEEK.format('g', '[1]')}"[:-40], 0),
        (ToolSyntax("array", starts=("[",)), '[{"name":"f","arguments":{}},{"name":"g"', 29),
    ],
)
def test_a_further_call_that_the_length_limit_cuts_is_no_text(syntax: ToolSyntax, output: str, first: int) -> None:
    for end in range(first or len(DEEPSEEK.format("f", "{}")), len(output) + 1):
        for parts in ([output[:end]], list(output[:end])):
            parser = OutputParser(syntax)
            pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish(is_cut=True)
            reasoning, text, calls = read(pieces)
            assert (reasoning, text, calls[0]) == ("", "", ("f", "{}")), output[:end]


def test_the_beginning_of_a_dropped_call_is_no_text() -> None:
    output = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g"'
    assert parsed(OutputParser(syntax_of("hermes"), max_calls=1), [output]) == ("", "", [("f", "{}")])


def test_forced_outputs_are_calls_and_nothing_else() -> None:
    array = '[{"name":"f","arguments":{"a":"]"}},{"name":"g","arguments":{}}]'
    calls = [("f", '{"a":"]"}'), ("g", "{}")]
    assert parsed(OutputParser(ToolSyntax("array", starts=("[",))), list(array)) == ("", "", calls)
    assert parsed(OutputParser(ToolSyntax("arguments", name="f")), list('{"a": {}}')) == ("", "", [("f", '{"a": {}}')])


@given(st.recursive(st.none() | st.booleans() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_the_end_of_a_json_value_is_found(value: object) -> None:
    text = json.dumps([value]) if not isinstance(value, str | list | dict) else json.dumps(value)
    scanner, taken = JsonScanner(), 0
    for char in f"{text}, next":
        taken += scanner.feed(char)
    assert taken == len(text)


@pytest.mark.parametrize(
    ("chat_format", "output"),
    [
        ("llama3", '{"answer": "AAAA"}'),
        ("hermes", '<tool_call>{"arguments": {"a": "AAAA"}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "AAAA"}</tool_call>'),
        ("mistral", '[{"name": "g", "arguments": {}}, {"arguments": {"a": "AAAA"}, "name": "f"}, {"no": "call"}]'),
    ],
)
def test_each_character_is_scanned_once(chat_format: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output, read_lengths, feed = output.replace("AAAA", "a" * 1000), list[int](), JsonScanner.feed

    def counted(scanner: JsonScanner, text: str) -> int:
        read_lengths.append(len(text))
        return feed(scanner, text)

    monkeypatch.setattr(JsonScanner, "feed", counted)
    at_once = parsed(OutputParser(syntax_of(chat_format)), [output])
    read_lengths.clear()
    assert parsed(OutputParser(syntax_of(chat_format)), list(output)) == at_once
    assert sum(read_lengths) <= len(output)


def test_a_long_name_is_not_searched_again_with_each_piece() -> None:
    output = f'<tool_call>{{"name": "{"a" * 5000}", "arguments": {{}}}}'
    parser = OutputParser(syntax_of("hermes"))
    assert parser.feed(output[:-1]) == [], "it is read once its object is complete"
    assert read(parser.feed(output[-1:]) + parser.finish()) == ("", "", [("a" * 5000, "{}")])


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_answer_of_a_format_keeps_its_bracket(is_whole: bool) -> None:
    answer = '[{"city":"Oslo"}]'
    parser = OutputParser(ToolSyntax("array", starts=("[{",)))
    assert parsed(parser, [answer] if is_whole else list(answer)) == ("", answer, [])
