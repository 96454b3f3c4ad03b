"""JSON schemas as clients' libraries write them."""

from __future__ import annotations

from typing import Any

_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""The formats that grammars enforce."""
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_VALUES = ("enum", "const", "default", "example", "examples", "x-guidance")
_ANY_NAME: tuple[object, ...] = (True, {}, {"type": "string"})


def without_annotations(schema: Any) -> Any:
    """Returns a copy of a schema without the keywords that allow every value, as a grammar compiler may refuse them:
    formats that are only annotations, such as pydantic's `binary` and `path`, and zod's `propertyNames` of records.
    """
    if isinstance(schema, list):
        return [without_annotations(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key == "propertyNames" and value in _ANY_NAME:
            continue
        if key in _OF_NAMES and isinstance(value, dict):
            kept[key] = {name: without_annotations(each) for name, each in value.items()}
        else:
            kept[key] = value if key in _OF_VALUES else without_annotations(value)
    return kept
