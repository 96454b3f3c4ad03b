"""Finds JSON schemas in grammars, and rewrites schemas for llguidance."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

_IN_FRAGMENTS = "%!$&'()*+,;=:@/?-._~"
_SCHEMA = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|<[^<>\s]++>|//[^\n]*+|#[^\n]*+|/(?:\\.|[^/\\])++/?|(?P<schema>%json\s*+(?={))', re.DOTALL
)
"""A schema's beginning, or a string, comment or regex to skip."""
_MOST_FAILURES = 100
_LEAST_INTEGER = -9223372036854774784
"""The least lower bound of integers that llguidance compiles."""
_MOST_NUMBER = 10**18
"""The largest bound of numbers that llguidance compiles."""
_OF_NAMES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_OF_VALUES = ("enum", "const", "default", "example", "examples", "x-guidance")
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""The formats that llguidance enforces."""
_ANY_NAME: tuple[object, ...] = (True, {}, {"type": "string"})


def readable(schema: Any) -> Any:
    """Returns a copy of a schema that llguidance compiles. References become URIs, which type names of other languages
    (`List[int]`, `Größe`) are not. Bounds at the ends of 64-bit numbers become a little narrower. Keywords that allow
    every value are left out: formats that are only annotations, such as pydantic's `path`, and the `propertyNames` of
    zod's records.
    """
    if isinstance(schema, list):
        return [readable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    written = {key: _readable_part(key, value) for key, value in schema.items() if not _allows_all(key, value)}
    is_whole = schema.get("type") == "integer"
    for key in ("minimum", "exclusiveMinimum"):
        least = _LEAST_INTEGER if is_whole else -_MOST_NUMBER
        if _is_number(schema.get(key)) and schema[key] < least:
            written[key] = least
    for key in ("maximum", "exclusiveMaximum"):
        if not is_whole and _is_number(schema.get(key)) and schema[key] > _MOST_NUMBER:
            written[key] = _MOST_NUMBER
    return written


def readable_grammar(grammar: str) -> str:
    """Applies `readable` to the schemas of a grammar."""
    (written, *texts), schemas = split_schemas(grammar)
    for schema, text in zip(schemas, texts, strict=True):
        written += f"%json {json.dumps(readable(schema))}{text}"
    return written


def split_schemas(grammar: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the texts before, between and after the JSON schemas of a grammar, and the schemas."""
    texts, schemas, done, failures = list[str](), list[dict[str, Any]](), 0, 0
    for found in _SCHEMA.finditer(grammar):
        if found["schema"] is None or found.start() < done or failures > _MOST_FAILURES:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):  # llguidance refuses it itself
            failures += 1
            continue
        texts.append(grammar[done : found.start()])
        schemas.append(schema)
        done = end
    return [*texts, grammar[done:]], schemas


def _readable_part(key: str, value: Any) -> Any:
    if key == "$ref" and isinstance(value, str):
        base, mark, fragment = value.partition("#")
        fragment = re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", fragment)
        return base + mark + quote(fragment, safe=_IN_FRAGMENTS, errors="replace")
    if key in _OF_NAMES and isinstance(value, dict):
        return {name: readable(each) for name, each in value.items()}
    return value if key in _OF_VALUES else readable(value)


def _allows_all(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    return key == "propertyNames" and value in _ANY_NAME


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
