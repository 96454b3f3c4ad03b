"""Reads fields of a model directory's JSON files, with errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytide.core.errors import DataError
from raytide.core.io.private_paths import safe_opener

_AGAIN = "Export or download the model again."


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. DataError says what is wrong with the file."""
    try:
        with open(path, encoding="utf-8", opener=safe_opener) as file:
            body = json.load(file)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}.", hint="Point at a Hugging Face model directory."
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}.", hint=_AGAIN) from None
    if not isinstance(body, dict):
        raise DataError(f"{path} holds no JSON object.", hint=_AGAIN)
    return body


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns token ids, which Hugging Face writes as one id, a list of ids, or null."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


class Fields:
    """A JSON object with typed accessors. Null counts as missing, except for `optional_*`."""

    def __init__(self, body: Mapping[str, object], where: str) -> None:
        self.body, self.where = body, where

    def whole(self, name: str, default: int | None = None) -> int:
        """Returns a positive integer."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(name, "a positive whole number")
        return value

    def optional_whole(self, name: str, default: int | None = None) -> int | None:
        """Returns the field; None if it is null, `default` if it is missing. Raises for any other type."""
        if name not in self.body:
            return default
        return None if self.body[name] is None else self.whole(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(name, "a number")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Returns the field; None if it is null, `default` if it is missing. Raises for any other type."""
        if name not in self.body:
            return default
        return None if self.body[name] is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def items(self, name: str) -> list[Any]:
        """Returns a list; empty if missing."""
        value = self._get(name, [])
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        values = self.items(name)
        if len(values) != count or not all(isinstance(value, int | float) for value in values):
            raise self._wrong(name, f"a list of {count} numbers")
        return tuple(float(value) for value in values)

    def ids(self, name: str) -> tuple[int, ...]:
        values = as_ids(self.body.get(name))  # type: ignore[arg-type]
        if not all(isinstance(value, int) for value in values):
            raise self._wrong(name, "a token id or a list of them")
        return values

    def section(self, name: str) -> Fields:
        """Returns a nested object; empty if missing."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, f"{self.where}: {name}")

    def _get(self, name: str, default: object) -> object:
        value = self.body.get(name)
        value = default if value is None else value
        if value is None:
            raise DataError(f"{self.where} has no {name!r}.", hint=_AGAIN)
        return value

    def _wrong(self, name: str, expected: str) -> DataError:
        return DataError(f"{self.where}: {name} is {self.body.get(name)!r}, not {expected}.", hint=_AGAIN)
