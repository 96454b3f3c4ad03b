"""Reads fields of a model directory's JSON files, with errors that name the field.

A directory may come from an unknown source. Files and numbers therefore have limits, far above those of real models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytide.core.bounds import shortened
from raytide.core.errors import DataError
from raytide.core.io.private_paths import safe_opener

_AGAIN = "Export or download the model again."

MOST_FILE_BYTES = 64 << 20
"""The most bytes of a file other than weights. The largest tokenizers have 35 MB."""
_MOST_WHOLE = 2**31 - 1
_MOST_NUMBER = 1e12
_MOST_ITEMS = 4096


def read_bytes(path: Path, hint: str = "Point at a Hugging Face model directory.") -> bytes:
    """Returns a file's content. Raises DataError if it cannot be read, is not a regular file or exceeds
    `MOST_FILE_BYTES`.
    """
    try:
        with open(path, "rb", opener=safe_opener) as file:
            content = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.", hint=hint) from None
    if len(content) > MOST_FILE_BYTES:
        raise DataError(f"{path} has more than {MOST_FILE_BYTES >> 20} MiB.", hint=hint)
    return content


def read_text(path: Path, hint: str = _AGAIN) -> str:
    """Returns a file's text. Raises DataError if the file cannot be read or is not UTF-8."""
    try:
        return read_bytes(path, hint).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}.", hint=hint) from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises a DataError that says what is wrong with the file."""
    content = read_bytes(path)
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}.", hint=_AGAIN) from None
    if not isinstance(body, dict):
        raise DataError(f"{path} holds no JSON object.", hint=_AGAIN)
    return body


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns token ids as a tuple. Hugging Face writes them as one id, a list of ids, or null."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


class Fields:
    """A JSON object with typed accessors. A null value counts as missing, except in the `optional_*` methods."""

    def __init__(self, body: Mapping[str, object], where: str) -> None:
        self.body, self.where = body, where

    def whole(self, name: str, default: int | None = None, *, most: int = _MOST_WHOLE) -> int:
        """Returns a field that is an integer from 1 to `most`."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(name, "a positive whole number")
        if value > most:
            raise self._wrong(name, f"at most {most}")
        return value

    def optional_whole(self, name: str, default: int | None = None) -> int | None:
        """Returns an integer field that may be null. Returns None if it is null, `default` if it is missing. Raises
        DataError for any other type.
        """
        if name not in self.body:
            return default
        return None if self.body[name] is None else self.whole(name)

    def number(self, name: str, default: float | None = None, *, above: float = -math.inf) -> float:
        """Returns a field that is a finite number greater than `above`."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MOST_NUMBER:
            raise self._wrong(name, "a number")
        if value <= above:
            raise self._wrong(name, f"above {above:g}")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Returns a number field that may be null. Returns None if it is null, `default` if it is missing. Raises
        DataError for any other type.
        """
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
        """Returns a field that is a list. The list is empty if the field is missing."""
        value = self._get(name, [])
        if not isinstance(value, list) or len(value) > _MOST_ITEMS:
            raise self._wrong(name, f"a list of at most {_MOST_ITEMS} entries")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        values = self.items(name)
        if len(values) != count or not all(isinstance(value, int | float) and 0 < value < 1e6 for value in values):
            raise self._wrong(name, f"a list of {count} positive numbers")
        return tuple(float(value) for value in values)

    def ids(self, name: str) -> tuple[int, ...]:
        values = as_ids(self.body.get(name))  # type: ignore[arg-type]
        if not all(isinstance(value, int) for value in values):
            raise self._wrong(name, "a token id or a list of them")
        return values

    def section(self, name: str) -> Fields:
        """Returns a field that is an object. The object is empty if the field is missing."""
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
        given = shortened(repr(self.body.get(name)), 100)
        return DataError(f"{self.where}: {name} is {given}, not {expected}.", hint=_AGAIN)
