"""Optional parts whose memory grows with the square of their number are refused before llguidance compiles them."""

from __future__ import annotations

import json

import pytest

from raytide.actors.engine import GenRequest, SamplingParams, Structured
from raytide.actors.engine.backends.vllm.request import check_request
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
