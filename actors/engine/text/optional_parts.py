"""Refuses regular expressions and grammars with so many optional parts in one token that llguidance would use gigabytes
of memory and minutes of CPU time. For each part of `a?b?c?...` it keeps all parts that may follow, and its own limits
do not count them.
"""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from math import isqrt

from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.text.json_schemas import split_schemas
from raytide.core.errors import UsageError

_MOST_OPTIONAL = 1000
"""The most optional parts: 1000 in `.?.?.?...` take 20 MB and 0.1 s; 8 times as many take 64 times as much."""
_OPTIONAL = re.compile(
    r'\\.|\(\?|(?P<optional>[?*]|\{(?=\s*[0,])|~(?=\s*0)|\|\s*(?=[|)\]]|\Z)|(?<=[(\[])\s*\||"")', re.DOTALL
)
_DEFINITION = re.compile(r"^[ \t]*+[?!]?([A-Za-z_][\w-]*+)[^:\n]*+:", re.MULTILINE)
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*+"|//[^\n]*+|#[^\n]*+|/(?:\\.|[^/\\])++/|\b(?P<name>[A-Z_][A-Z0-9_]*+)\b', re.DOTALL
)
"""A token's name, or a string, comment or regex to skip."""


def check_optional_parts(structured: Structured) -> None:
    """Raises UsageError if a token of a regular expression or a grammar has too many optional parts."""
    if structured.kind == "regex":
        most = _optional(str(structured.spec))
    elif structured.kind == "grammar":
        most = _of_tokens("".join(split_schemas(_lark(str(structured.spec)))[0]))
    else:
        return  # in a schema, they follow a quotation mark, where llguidance's limits count
    if most > _MOST_OPTIONAL:
        raise UsageError(
            f"the {structured.kind} of structured output has more than {_MOST_OPTIONAL} optional parts in one token.",
            hint="Make it simpler.",
        )


def _lark(grammar: str) -> str:
    """Returns a grammar as llguidance translates it to Lark, because GBNF's names do not tell tokens from rules."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception:  # llguidance refuses it itself
        return ""


def _optional(text: str) -> int:
    return sum(found["optional"] is not None for found in _OPTIONAL.finditer(text))


def _of_tokens(rules: str) -> int:
    """Returns the number of optional parts with which one token would take the memory of all tokens of a grammar. A
    token's parts include those of the tokens in it.
    """
    rules = _TOKEN.sub(lambda text: text[0].replace("\n", " "), rules)
    found = list(_DEFINITION.finditer(rules))
    ends = [*(each.start() for each in found[1:]), len(rules)][: len(found)]
    bodies = {each[1]: rules[each.end() : end] for each, end in zip(found, ends, strict=True)}
    tokens = {name: body for name, body in bodies.items() if not re.search("[a-z]", name)}
    inner = {
        name: [each["name"] for each in _TOKEN.finditer(body) if each["name"] in tokens]
        for name, body in tokens.items()
    }
    counts: dict[str, int] = {}
    try:
        for name in TopologicalSorter(inner).static_order():
            own = _optional(tokens[name]) + tokens[name].count("[")
            counts[name] = min(own + sum(counts[each] for each in inner[name]), _MOST_OPTIONAL + 1)
    except CycleError as error:
        raise UsageError(f"token {error.args[1][0]} of the grammar contains itself.", hint="Make it a rule.") from None
    alone = (_optional(body) + body.count("[") for name, body in bodies.items() if name not in tokens and "/" in body)
    return isqrt(sum(count * count for count in (*counts.values(), *alone)))
