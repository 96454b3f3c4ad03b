"""Optional parts whose memory grows with the square of their number are refused before llguidance compiles them."""

from __future__ import annotations

import json
import re
import time

import pytest
from llguidance.gbnf_to_lark import any_to_lark

from raytide.actors.engine import GenRequest, SamplingParams, Structured
from raytide.actors.engine.backends.vllm.request import check_request
from raytide.actors.engine.text.json_schemas import readable_grammar
from raytide.actors.engine.text.optional_parts import check_optional_parts
from raytide.actors.engine.text.structured_output import GrammarCompiler
from raytide.core.errors import UsageError


def doubling(levels: int, part: str) -> str:
    """Returns a short grammar with a token of 4**levels parts."""
    tokens = [f"T{level + 1}: T{level} T{level} T{level} T{level}" for level in range(levels)]
    return "\n".join([f"start: T{levels}", f"T0: {part}", *tokens])


def gbnf(levels: int) -> str:
    """Returns the same grammar as llama.cpp writes it, where names do not tell tokens from rules."""
    tokens = [f"t{level + 1} ::= t{level} t{level} t{level} t{level}" for level in range(levels)]
    return "\n".join([f"root ::= t{levels}", 't0 ::= "a"? "b"?', *tokens])


def test_a_rule_with_a_name_in_capitals_may_contain_itself_where_names_mean_nothing() -> None:
    check_optional_parts(Structured("grammar", 'root ::= EXPR\nEXPR ::= [0-9] | "(" EXPR ")"'))


def test_an_object_with_many_optional_fields_is_taken_as_llama_cpp_writes_it() -> None:
    """As its converter of schemas does: each field may be the first, and refers to those that may follow it."""
    count = 20
    fields = [f'k{at} ::= "\\"k{at}\\"" space ":" space string' for at in range(count)]
    rests = [f'r{at} ::= ( "," space k{at + 1} )? r{at + 1}' for at in range(count - 1)]
    firsts = " | ".join(f"k{at} r{at}" for at in range(count))
    rules = [
        'root ::= "[" space (item ("," space item)*)? "]" space',
        f'item ::= "{{" space ({firsts})? "}}" space',
        *fields,
        *rests,
        f'r{count - 1} ::= ""',
        r'char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})',
        r'space ::= | " " | "\n"{1,2} [ \t]{0,20}',
        r'string ::= "\"" char* "\"" space',
    ]
    assert "STRING:" in any_to_lark("\n".join(rules)), "else nothing would be counted"
    check_optional_parts(Structured("grammar", "\n".join(rules)))


@pytest.mark.parametrize(
    "grammar",
    ["\n" * 131_072, "start: A\n" + " \n" * 60_000, "\n".join(f"a{at} ::= a{at + 1}" for at in range(9_000))],
    ids=["empty", "spaces", "chain"],
)
def test_a_grammar_that_takes_long_to_look_at_is_refused_at_once(grammar: str) -> None:
    with pytest.raises(UsageError, match=r"too many empty lines|too many rules"):
        check_optional_parts(Structured("grammar", grammar))


@pytest.mark.parametrize(
    "structured",
    [
        Structured("regex", ".?" * 1001),
        Structured("regex", "a*" * 1001),
        Structured("regex", "a{0,9}" * 1001),
        Structured("regex", "(a|)" * 1001),
        Structured("regex", "(|a)" * 1001),
        Structured("grammar", doubling(8, '"a"? "b"?')),
        Structured("grammar", doubling(8, "/.?/")),
        Structured("grammar", doubling(8, '["a"]')),
        Structured("grammar", doubling(8, '"a"~0..2')),
        Structured("grammar", doubling(4, "/.?/") + "".join(f'\nA{place}: T4 "{place}"' for place in range(99))),
        Structured("grammar", gbnf(8)),
        Structured("grammar", f"start: /{'.?' * 1001}/"),
        Structured("grammar", 'start: %json {"type": "object"} T\nT: ' + '"a"? ' * 1001),
    ],
    ids=lambda each: f"{each.kind} {each.spec[:20]}",
)
def test_many_optional_parts_are_refused(structured: Structured) -> None:
    with pytest.raises(UsageError, match=r"optional parts"):
        check_optional_parts(structured)
    with pytest.raises(UsageError, match=r"too deeply|optional parts"):
        check_request(GenRequest(request_id="r", prompt=[1], sampling=SamplingParams(structured=structured)))

    def unread() -> str:
        raise AssertionError("it was compiled")

    pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")
    with pytest.raises(UsageError, match=r"optional parts"):
        GrammarCompiler(unread, 512, [0]).compile(structured)


def test_tokens_cannot_be_hidden_from_the_count() -> None:
    for hidden in ('/"/ T0 T0 T0 T0 /"/', "/x\nB: / T0 T0 T0 T0 / /"):
        grammar = doubling(8, '"a"?').replace("T0 T0 T0 T0", hidden)
        with pytest.raises(UsageError, match=r"optional parts"):
            check_optional_parts(Structured("grammar", grammar))
    schema_in_a_text = doubling(8, '"a"?').replace("T0 T0 T0 T0", '"%json {" T0 T0 T0 ":[" T0 T0 "]}"')
    with pytest.raises(UsageError, match=r"optional parts"):
        check_optional_parts(Structured("grammar", schema_in_a_text))
    schema_in_a_comment = gbnf(8).replace("root ::= t8", "root ::= t8 # %json {\n}")
    assert readable_grammar(schema_in_a_comment) == schema_in_a_comment, "else it would become a grammar"
    with pytest.raises(UsageError, match=r"token A of the grammar contains itself"):
        check_optional_parts(Structured("grammar", doubling(8, '"a"?') + "\nA: A\n"))


@pytest.mark.parametrize(
    "structured",
    [
        Structured("regex", "|".join(f"(?:Is item {place} yours\\?)" for place in range(4000))),
        Structured("regex", r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?"),
        Structured("regex", "|".join(f"[a-z]{{3}}{place}" for place in range(2000))),
        Structured("grammar", "start: CITY+\nCITY: " + " | ".join(f'"city {place}"' for place in range(5000))),
        Structured("grammar", "start: %json " + json.dumps({"description": "Is it? " * 2000}) + "\n"),
        Structured("grammar", "start: r0\n" + "\n".join(f'r{i}: r{i + 1}? "x"*' for i in range(700)) + '\nr700: "a"'),
        Structured("grammar", "start: T0\n" + "\n".join(f'T{place}: "a"? /b*c?/' for place in range(300))),
        Structured("grammar", "start: A\n" + "a" * (1 << 17)),
        Structured("grammar", "%json " * 20_000),
        Structured(
            "grammar", 'start: A SELECT\nA: /[A-Z]+/ // A B\nSELECT: "SELECT" | "SELECT ALL"i\nALL: "ALL \\"ALL"\n'
        ),
        Structured("json_schema", json.dumps({"type": "string", "description": "?" * 2000})),
        Structured("choice", ("?" * 2000,)),
    ],
    ids=lambda each: f"{each.kind} {str(each.spec)[:20]}",
)
def test_what_clients_send_is_taken(structured: Structured) -> None:
    check_optional_parts(structured)


@pytest.mark.parametrize(
    "grammar",
    [
        doubling(8, '"a"?').replace("T", "T-"),
        doubling(8, '"a"?').replace("\n", " -> x "),
        doubling(8, '"a"?').replace("\n", "\n%llguidance {} "),
        doubling(8, '"a"?').replace("start: ", "start: </s> ") + "\nx: </s>",
        'y: <">\n' + doubling(8, '"a"?') + '\nx: <">',
        *(
            re.sub(r"(T\d) \1 \1 \1", to, doubling(8, '"a"?'))
            for to in (
                r'"a"i\1 "a"i\1 "a"i\1 "a"i\1',
                r"/a/i\1 /a/i\1 /a/i\1 /a/i\1",
                r'"a"~1\1~1\1~1\1~1\1',
                '/\n[%json {"a": "]/ \\1 \\1 \\1 \\1 /"}/',
            )
        ),
    ],
)
def test_tokens_are_found_as_llguidance_finds_them(grammar: str) -> None:
    with pytest.raises(UsageError, match=r"optional parts"):
        check_optional_parts(Structured("grammar", grammar))


@pytest.mark.parametrize("text", ['"\\' * 65_000, "/a\\" * 43_000], ids=["text", "regex"])
def test_a_text_without_end_is_read_once(text: str) -> None:
    """Else it takes 40 s."""
    began_s = time.process_time()
    check_optional_parts(Structured("grammar", f"start: A\n{text}"))
    assert time.process_time() - began_s < 10.0


def test_a_schema_in_a_grammar_may_not_be_nested_too_deeply() -> None:
    grammar = 'start: %json {"a":' + "[" * 600 + "]" * 600 + "}"
    with pytest.raises(UsageError, match=r"too deeply"):
        check_optional_parts(Structured("grammar", grammar))
