"""The core dataclasses as JSON and back, for the API and the state that it shows."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(cls: Any) -> TypeAdapter[Any]:
    """Built once for each type: that is the slow part."""
    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def to_json(value: object) -> Any:
    """A core dataclass or Config as plain JSON values."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_json(cls: type[T], data: object) -> T:
    value: T = _adapter(cls).validate_python(data)
    return value
