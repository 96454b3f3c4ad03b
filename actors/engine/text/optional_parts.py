"""Refuses regular expressions and grammars with so many optional parts in one token that llguidance would use gigabytes
of memory and minutes of CPU time. For each part of `a?b?c?...` it keeps all parts that may follow, and its own limits
do not count them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from math import ceil, isqrt

from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.text.json_schemas import readable_grammar, split_schemas
from raytide.core.errors import UsageError

_MOST_OPTIONAL = 1000
"""The most optional parts: 1000 in `.?.?.?...` take 20 MB and 0.1 s; 8 times as many take 64 times as much."""
_MOST_IN_GBNF = 4000
"""The same for GBNF, of which llguidance makes large tokens whose parts are mostly in alternatives."""
_MOST_RULES, _MOST_BLANK_LINES = 2000, 100
"""The most rules of GBNF, and empty lines in a row: llguidance takes time with the square of their number."""
_MOST_STEPS = 1_000_000
"""The most characters through which a search of llguidance goes again from each of some lines."""
_BLANK = re.compile(r"\s++")
_REGEX = re.compile(r"/(?:\\.|[^/\\])++/?", re.DOTALL)
_OPTIONAL = re.compile(
    r'\\.|\(\?|(?P<optional>[?*]|\{(?=\s*[0,])|~(?=\s*0)|\|\s*(?=[|)\]]|\Z)|(?<=[(\[])\s*\||"")', re.DOTALL
)
_DEFINITION = re.compile(  # one may also follow an alias or a statement
    r"(?:^[ \t]*+|->[ \t]*+[a-z_][\w-]*+[ \t]++|%llguidance[ \t]*+\{[^\n{}]*+\}[ \t]*+)"
    r"[?!]?([A-Za-z_][\w-]*+)[^:\n]*+:",
    re.MULTILINE,
)
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*+"?i?|//[^\n]*+|#[^\n]*+|<[^<>\s]++>|/(?:\\.|[^/\\])++/?[imslux]*+|@[\w-]++'
    r"|[+-]?\d++(?:\.\d*+)?(?:[eE][+-]?\d++)?|!?[_?]?[a-z][a-z0-9_-]*+|(?P<name>_?[A-Z][A-Z0-9_-]*+)",
    re.DOTALL,
)
"""The name of a token, or another word of the grammar to skip."""


def check_optional_parts(structured: Structured) -> None:
    """Raises UsageError if a token of a regular expression or a grammar has too many optional parts."""
    if structured.kind == "regex":
        most = _optional(str(structured.spec))
    elif structured.kind == "grammar":
        try:
            text = readable_grammar(str(structured.spec))  # the text that is compiled
        except RecursionError:
            raise UsageError("a schema in the grammar is nested too deeply.", hint="Make it flatter.") from None
        most = _of_tokens("".join(split_schemas(text)[0])) if (lark := _from_gbnf(text)) is None else _of_gbnf(lark)
    else:
        return  # in a schema, they follow a quotation mark, where llguidance's limits count
    if most > _MOST_OPTIONAL:
        raise UsageError(
            f"the {structured.kind} of structured output has too many optional parts in one token.",
            hint="Make it simpler.",
        )


@lru_cache(maxsize=16)  # vLLM gets a request per sample
def _from_gbnf(grammar: str) -> str | None:
    """Returns a grammar in GBNF as llguidance translates it to Lark, and None for one in Lark. Raises UsageError if the
    translation would take seconds.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    blanks = ((each.count("\n"), len(each)) for each in _BLANK.findall(grammar))
    if any(lines > _MOST_BLANK_LINES or lines * size > _MOST_STEPS for lines, size in blanks):
        raise UsageError("the grammar of structured output has too many empty lines.", hint="Remove them.")
    if is_lark_syntax(grammar):
        return None
    rules = grammar.count("::=")
    if rules > _MOST_RULES or rules * len(grammar) > 10 * _MOST_STEPS:  # it may pass over the text for each rule
        raise UsageError("the grammar of structured output has too many rules.", hint="Make it simpler.")
    try:
        return str(gbnf_to_lark(grammar))
    except Exception:  # llguidance refuses it itself
        return ""


def _of_gbnf(lark: str) -> int:
    """Returns the optional parts of a translated grammar on the scale of `_MOST_OPTIONAL`."""
    found = _of_tokens("".join(split_schemas(lark)[0]), only_in_rules=True)
    return ceil(found * _MOST_OPTIONAL / _MOST_IN_GBNF)


def _optional(text: str) -> int:
    return sum(found["optional"] is not None for found in _OPTIONAL.finditer(text))


def _groups(body: str) -> int:
    """Returns the number of optional groups in brackets. In a regular expression, brackets are classes."""
    return _REGEX.sub("", body).count("[")


def _of_tokens(rules: str, *, only_in_rules: bool = False) -> int:
    """Returns the number of optional parts with which one token would take the memory of all tokens of a grammar, or of
    those in its rules. A token's parts include those of the tokens in it.
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
            own = _optional(tokens[name]) + _groups(tokens[name])
            counts[name] = min(own + sum(counts[each] for each in inner[name]), _MOST_IN_GBNF + 1)
    except CycleError as error:
        raise UsageError(f"token {error.args[1][0]} of the grammar contains itself.", hint="Make it a rule.") from None
    alone = (_optional(body) + _groups(body) for name, body in bodies.items() if name not in tokens and "/" in body)
    if only_in_rules:
        used = {each["name"] for name, body in bodies.items() if name not in tokens for each in _TOKEN.finditer(body)}
        counts = {name: count for name, count in counts.items() if name in used}
    return isqrt(sum(count * count for count in (*counts.values(), *alone)))
