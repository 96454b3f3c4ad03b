"""Reads tool calls that a model writes in tags, as Qwen3-Coder does:
`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`.

Schemas give the arguments' types, `null` is null for every type, and closing tags may be missing, all as in vLLM.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

_WRAPPER, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_CALL = re.compile(r"(<tool_call>\s{0,99})?<function=([^<>\n]{1,64})>")
_OPEN = re.compile(r"<function=[^<>\n]{0,64}\Z")
_NEXT = re.compile(r"<parameter=([^<>\n]{1,999})>|</function>|</tool_call>")
_END = "</parameter>"
_VALUE_ENDS = (_END, _PARAMETER, "</function>", "</tool_call>")
_VALUE_END = re.compile("|".join(map(re.escape, _VALUE_ENDS)))
_LONGEST_END = max(map(len, _VALUE_ENDS))
_MOST_TAG_CHARS = 1011
_NULL = "null"
_TEXTS = frozenset({"string", "null"})
_MOST_LITERAL_CHARS = 1 << 16


def call_in(text: str, names: Collection[str]) -> re.Match[str] | None:
    """Returns the match of the first call's beginning in `text`; its group 2 is the tool's name. Without `<tool_call>`,
    which models sometimes leave out, the name must be one of `names`.
    """
    return next((found for found in _CALL.finditer(text) if found[1] or found[2].strip() in names), None)


def length_held(text: str) -> int:
    """Returns the length of the end of `text` that may be the beginning of a call."""
    opened = _OPEN.search(text)
    start = len(text) - overlap(text, _FUNCTION) if opened is None else opened.start()
    before = text[:start].rstrip()
    if before.endswith(_WRAPPER):
        return len(text) - len(before) + len(_WRAPPER)
    return max(len(text) - start, overlap(text, _WRAPPER))


def overlap(text: str, marker: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class TaggedArguments:
    """Reads the arguments of one call while their text arrives. Strings are returned piece by piece, other values once
    they are complete.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._has_begun = self._has_parameters = False
        self._types: frozenset[str] | None = None
        """The types of the value that is being read; None between values."""
        self._is_open = False
        """True inside a text whose first piece has been returned."""
        self._searched = 0
        """The number of unread characters searched for the value's end."""
        self.is_complete = False

    def feed(self, text: str, *, is_end: bool) -> tuple[str, int]:
        """Returns the JSON text that is certain, and the number of characters of `text` that have been read. Pass the
        rest again, followed by new text. `is_end` closes what is open.
        """
        out, at = "" if self._has_begun else "{", 0
        self._has_begun = True
        while not self.is_complete:
            step = self._next(text, at, is_end) if self._types is None else self._value(text, at, is_end)
            if step is None:
                break
            out, at = out + step[0], step[1]
        return out, at

    def _next(self, text: str, at: int, is_end: bool) -> tuple[str, int] | None:
        """Reads up to the next value or the end of the call."""
        found = _NEXT.search(text, at)
        if found is None and not is_end:
            start = text.rfind("<", max(at, len(text) - _MOST_TAG_CHARS))  # text between the tags is left out
            stop = len(text) if start < 0 else start
            return ("", stop) if stop > at else None
        if found is None or found[1] is None:
            self.is_complete = True
            return "}", len(text) if found is None else found.end() if found[0] == "</function>" else found.start()
        name = found[1].strip()
        comma = ", " if self._has_parameters else ""
        self._has_parameters, self._is_open, self._searched = True, False, 0
        self._types = frozenset(_types(self._properties.get(name), self._schema, set()))
        return f"{comma}{json.dumps(name, ensure_ascii=False)}: ", found.end()

    def _value(self, text: str, at: int, is_end: bool) -> tuple[str, int] | None:
        assert self._types is not None
        found = _VALUE_END.search(text, max(at, at + self._searched - _LONGEST_END))
        if found is not None or is_end:
            stop = len(text) if found is None else found.start()
            after = found.end() if found is not None and found[0] == _END else stop
            value = text[at:stop].removesuffix("\n")
            value = value if self._is_open else text[at:stop].removeprefix("\n").removesuffix("\n")
            types, self._types = self._types, None
            return (f'{_inside(value)}"' if self._is_open else _written(value, types)), after
        if not self._types <= _TEXTS:
            self._searched = len(text) - at
            return None
        stop = len(text) - max(overlap(text, end) for end in _VALUE_ENDS)
        stop -= text[at:stop].endswith("\n")  # the last line break belongs to the tags
        value = text[at:stop] if self._is_open else text[at:stop].removeprefix("\n")
        if not value or (not self._is_open and _NULL.startswith(value.lower())):
            return None
        quote, self._is_open = "" if self._is_open else '"', True
        return quote + _inside(value), stop


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _written(value: str, types: frozenset[str]) -> str:
    """Returns a value as JSON of one of the types, or as a string if it fits none."""
    if value.lower() == _NULL:
        return _NULL
    readers: list[Callable[[str], Any]] = [] if types <= _TEXTS else [json.loads, _literal]
    if types - {"null"} == {"integer"}:
        readers.insert(0, int)
    if types - {"null"} == {"boolean"}:
        readers.insert(0, lambda text: json.loads(text.lower()))
    for read in readers:
        try:
            written = json.dumps(read(value), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return written.encode(errors="backslashreplace").decode()  # it may have half a surrogate pair
    return json.dumps(value, ensure_ascii=False)


def _literal(text: str) -> Any:
    """Evaluates a Python literal, a form in which models write some objects. Raises ValueError for a long one."""
    if len(text) > _MOST_LITERAL_CHARS:
        raise ValueError(f"{len(text)} characters")
    return ast.literal_eval(text)


def _types(schema: Any, root: Mapping[str, Any], seen: set[str]) -> Iterator[str]:
    """Yields the names of the types that a schema allows. `seen` contains the definitions visited so far."""
    if not isinstance(schema, Mapping):
        return
    kinds = schema.get("type")
    yield from (kind.lower() for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            yield from _types(part, root, seen)
    place = schema.get("$ref")
    found = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", place) if isinstance(place, str) else None
    if found is not None and found[0] not in seen:
        seen.add(found[0])
        definitions = root.get(found[1])
        yield from _types(definitions.get(found[2]) if isinstance(definitions, Mapping) else None, root, seen)
    if kinds is None:
        given = schema.get("enum", [schema["const"]] if "const" in schema else [])
        yield from (_KINDS.get(type(value), "object") for value in (given if isinstance(given, list) else ()))


_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
}
