"""Reads the header of a GGUF file (versions 2 and 3, little endian): its fields, and the position of each tensor.

A file may come from an unknown source. Every count is checked against the size of the file before memory for the
counted items is allocated. Texts are decoded only when they are requested.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from raytide.actors.models.quantized.gguf.packaged_models import is_packaged
from raytide.core.bounds import shortened
from raytide.core.errors import ConfigError, DataError
from raytide.core.io.private_paths import safe_opener

MOST_HEADER_BYTES = 128 << 20
"""The most bytes before the tensors. A vocabulary of 262,144 tokens has 20 MB."""
_MOST_FIELDS, _MOST_TENSORS, _MOST_TEXTS, _MOST_NAME_BYTES = 1 << 12, 1 << 17, 1 << 21, 1 << 10
_MOST_DIMENSIONS = 4
_AGAIN = "Download or convert the model again."

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9

BLOCK_FORMATS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
"""The formats that are read, each with the number of values in a block, and the block's bytes."""
_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The format, shape and position of a tensor in a GGUF file. The shape is in torch's order, in which the last
    dimension is contiguous.
    """

    format: str
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Texts:
    """A list of texts that are not decoded yet: its place in the file and its length."""

    start: int
    count: int


def is_gguf(model: str | Path) -> bool:
    """Returns whether a model's path names a GGUF file. All other models are directories."""
    return Path(model).suffix == ".gguf"


class GgufFile:
    """An open GGUF file. Raises DataError if the file is unreadable or damaged. Raises ConfigError if the file is not
    supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb", opener=None if is_packaged(path) else safe_opener) as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}.", hint="Point at a GGUF file.") from None
        self.header_bytes = 0
        """The bytes of the header that are read so far."""
        self._texts_left = _MOST_TEXTS
        tensors, fields = self._counts()
        self._fields = dict[str, object]()
        for _ in range(fields):
            name = self._short_text("a field's name")
            if name in self._fields:
                raise self._damaged(f"field {name} stands twice")
            self._fields[name] = self._value(self._number("I"))
        self.tensors = self._read_tensors(tensors)

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def where(self) -> str:
        return str(self.path)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def text(self, name: str, default: str | None = None) -> str:
        """Returns the value of a text field. A missing field has the value `default`. Raises an error if the value is
        not a text.
        """
        value = self._fields.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def number(self, name: str, default: float | None = None) -> int | float:
        value = self._fields.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(name, "a number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._fields.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def texts(self, name: str) -> list[str]:
        """Returns a field that is a list of texts."""
        value = self._fields.get(name)
        if not isinstance(value, _Texts):
            raise self._wrong(name, "a list of texts")
        at, found = value.start, list[str]()
        for _ in range(value.count):
            (length,) = struct.unpack_from("<Q", self.data, at)
            found.append(self._decoded(at + 8, length))
            at += 8 + length
        return found

    def numbers(self, name: str) -> list[int | float]:
        """Returns a field that is a list of numbers. A field that is a single number becomes a list of one."""
        value = self._fields.get(name)
        if isinstance(value, int | float):
            return [value]
        if not isinstance(value, tuple):
            raise self._wrong(name, "a list of numbers")
        kind, start, count = value
        return list(struct.unpack_from(f"<{count}{kind}", self.data, start))

    def _counts(self) -> tuple[int, int]:
        if self.data[:4] != b"GGUF":
            raise DataError(f"{self.path} is no GGUF file.", hint="It begins with GGUF.")
        self.header_bytes = 4
        version = self._number("I")
        if version not in (2, 3):
            kind = "of big-endian numbers " if version in (2 << 24, 3 << 24) else ""
            raise ConfigError(f"{self.path} is a file {kind}of version {version}.", hint="Versions 2 and 3 are read.")
        tensors, fields = self._number("Q"), self._number("Q")
        if tensors > _MOST_TENSORS or fields > _MOST_FIELDS:
            raise self._damaged(f"it announces {tensors} tensors and {fields} fields")
        return tensors, fields

    def _number(self, kind: str) -> int:
        size = struct.calcsize(f"<{kind}")
        self._check_room(size)
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.header_bytes)
        self.header_bytes += size
        return int(value)

    def _check_room(self, size: int) -> None:
        if size > len(self.data) - self.header_bytes:
            raise self._damaged("it ends in the middle of its header")
        if self.header_bytes + size > MOST_HEADER_BYTES:
            raise self._damaged(f"its header exceeds {MOST_HEADER_BYTES >> 20} MiB")

    def _short_text(self, what: str) -> str:
        length = self._number("Q")
        if length > _MOST_NAME_BYTES:
            raise self._damaged(f"{what} has {length} bytes")
        return self._text(length)

    def _text(self, length: int) -> str:
        self._check_room(length)
        self.header_bytes += length
        return self._decoded(self.header_bytes - length, length)

    def _decoded(self, start: int, length: int) -> str:
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"a text is not UTF-8 ({error.reason})") from None

    def _value(self, kind: int) -> object:
        if kind == _TEXT:
            return self._text(self._number("Q"))
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        code = self._scalar(kind)
        self._check_room(struct.calcsize(f"<{code}"))
        (value,) = struct.unpack_from(f"<{code}", self.data, self.header_bytes)
        self.header_bytes += struct.calcsize(f"<{code}")
        return value

    def _array(self, kind: int, count: int) -> object:
        start = self.header_bytes
        if kind == _TEXT:
            self._texts_left -= count
            if self._texts_left < 0:
                raise self._damaged(f"it has more than {_MOST_TEXTS} texts")
            for _ in range(count):
                length = self._number("Q")
                self._check_room(length)
                self.header_bytes += length
            return _Texts(start, count)
        code = self._scalar(kind)
        size = count * struct.calcsize(f"<{code}")
        self._check_room(size)
        self.header_bytes += size
        return code, start, count

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._damaged(f"a field has the unknown type {kind}")
        return _SCALARS[kind]

    def _read_tensors(self, count: int) -> dict[str, GgufTensor]:
        listed = list[tuple[str, tuple[int, ...], int, int]]()
        for _ in range(count):
            name, dimensions = self._short_text("a tensor's name"), self._number("I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise self._damaged(f"tensor {shortened(name, 100)} has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            listed.append((name, shape, self._number("I"), self._number("Q")))
        alignment = self.number("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._wrong("general.alignment", "a small positive number")
        base = -(-self.header_bytes // alignment) * alignment
        found = dict[str, GgufTensor]()
        for name, shape, kind, offset in listed:
            if name in found:
                raise self._damaged(f"tensor {shortened(name, 100)} stands twice")
            found[name] = self._tensor(name, shape, kind, base + offset)
        return found

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        name = shortened(name, 100)
        form = _NAMES.get(kind, f"number {kind}")
        if form not in BLOCK_FORMATS:
            raise ConfigError(
                f"{self.path}: tensor {name} has the format {form}, which is not read.",
                hint=f"Supported: {', '.join(BLOCK_FORMATS)}.",
            )
        numbers, block_bytes = BLOCK_FORMATS[form]
        if shape[-1] % numbers:
            raise self._damaged(f"tensor {name} has rows of {shape[-1]} numbers, no multiple of {numbers}")
        size = prod(shape) // numbers * block_bytes
        if not size or start + size > len(self.data):
            raise self._damaged(f"tensor {name} is outside of the file")
        return GgufTensor(form, shape, start, size)

    def _wrong(self, name: str, expected: str) -> DataError:
        there = "is not" if name in self._fields else "is missing, which is"
        return DataError(f"{self.path}: field {name} {there} {expected}.", hint=_AGAIN)

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{self.path} is damaged: {what}.", hint=_AGAIN)
