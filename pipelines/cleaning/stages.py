"""Users' own cleaning stages. A stage is a plain Python function. It is found by the name of its module or by its file,
and identified by a hash of its code.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raytide.core.errors import DataError
from raytide.core.io.storage import read_bytes
from raytide.core.specs.cleaning import UserStage


@dataclass(frozen=True, slots=True)
class Place:
    """The origin of a document: its file and its row. Row 0 is the row that begins at the byte `start` of the file."""

    url: str
    row: int | None = None
    start: int = 0

    def __str__(self) -> str:
        where = f"{self.url} from byte {self.start} on" if self.start else self.url
        return where if self.row is None else f"{where}, row {self.row}"


@dataclass(frozen=True, slots=True)
class StageCode:
    """A user's stage with its code, as it is pickled for workers.

    If the stage is in a file, the file's source is pickled. If it is in a module, the module must be installed on the
    workers.
    """

    stage: UserStage
    source: bytes | None
    """The content of the file; None for a module."""
    digest: str

    def run(self, texts: Sequence[str], places: Sequence[Place]) -> list[list[str]]:
        """Applies the stage to texts. Returns one list for each text, with the texts into which the stage has turned
        it.

        The list is empty if the stage drops the text. If the stage fails or returns a wrong type, raises a DataError
        that names the file and the row.
        """
        function = _function(self)
        if self.stage.kind == "batch":
            return _batch(self.stage, function, texts, places)
        return [
            _checked(self.stage, _call(self.stage, function, text, place), text, place)
            for text, place in zip(texts, places, strict=True)
        ]


def load_stage(stage: UserStage) -> StageCode:
    """Loads a stage's code. Raises DataError if the file, the module or the function does not exist."""
    home, _, _ = stage.function.rpartition(":")
    source = read_bytes(home) if stage.is_file else None
    code = StageCode(stage, source, _digest(stage, source if source is not None else _module_source(home, stage)))
    _function(code)
    return code


_functions: dict[str, Callable[[Any], Any]] = {}
"""Functions of this process by the digest of their code."""


def _function(code: StageCode) -> Callable[[Any], Any]:
    if code.digest in _functions:
        return _functions[code.digest]
    home, _, name = code.stage.function.rpartition(":")
    if code.source is None:
        if _digest(code.stage, _module_source(home, code.stage)) != code.digest:
            raise DataError(
                f"stage {code.stage.function}: this node has another version of {home} than the driver.",
                hint="Install the same version everywhere, or give the stage as a file.",
            )
        module = importlib.import_module(home)
    else:
        module = _executed(code.source, home, code.digest)
    function: Callable[[Any], Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        raise DataError(f"stage {code.stage.function}: {home} has no function {name}.", hint="Check the name.")
    _functions[code.digest] = function
    return function


def _digest(stage: UserStage, content: bytes) -> str:
    return hashlib.sha256(f"{stage.name}\0{stage.kind}\0{stage.version}\0".encode() + content).hexdigest()


def _executed(source: bytes, home: str, digest: str) -> types.ModuleType:
    """Runs a file as a module of its own. Its functions can be pickled, because the module is registered."""
    module = types.ModuleType(f"raytide_stage_{digest[:16]}")
    module.__file__ = home
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, home, "exec"), module.__dict__)  # the code that the user asked for  # nosec B102
    except Exception as error:
        del sys.modules[module.__name__]
        raise DataError(f"stage file {home} cannot be run: {_said(error)}.", hint="Correct the file.") from error
    return module


def _module_source(home: str, stage: UserStage) -> bytes:
    try:
        return inspect.getsource(importlib.import_module(home)).encode()
    except (ImportError, OSError, TypeError) as error:
        raise DataError(
            f"stage {stage.function}: cannot import {home}: {error}.",
            hint="Install the module on every node, or give a path that ends in .py.",
        ) from None


def _call(stage: UserStage, function: Callable[[Any], Any], argument: object, place: Place) -> Any:
    try:
        return function(argument)
    except Exception as error:
        raise DataError(
            f"stage {stage.function} failed on {place}: {_said(error)}.",
            hint="Correct the function, or let it return None for such a document. Nothing was written.",
        ) from error


def _batch(
    stage: UserStage, function: Callable[[Any], Any], texts: Sequence[str], places: Sequence[Place]
) -> list[list[str]]:
    if not texts:
        return []
    try:
        results = function(list(texts))
    except Exception:
        # One document after the other finds the one that fails, if it fails alone.
        results = [
            each for text, place in zip(texts, places, strict=True) for each in _call(stage, function, [text], place)
        ]
    if not isinstance(results, list) or len(results) != len(texts):
        raise DataError(
            f"stage {stage.function} returned {_shape(results)} for {len(texts)} documents from {places[0]} on.",
            hint="A batch stage returns a list with one text or None for each document.",
        )
    return [_one(stage, result, place) for result, place in zip(results, places, strict=True)]


def _checked(stage: UserStage, result: object, text: str, place: Place) -> list[str]:
    if stage.kind == "filter":
        return [text] if result else []
    if stage.kind == "map":
        return _one(stage, result, place)
    if not isinstance(result, list | tuple) or not all(isinstance(each, str) for each in result):
        raise _wrong(stage, result, place, "a list of texts")
    return list(result)


def _one(stage: UserStage, result: object, place: Place) -> list[str]:
    if result is None:
        return []
    if not isinstance(result, str):
        raise _wrong(stage, result, place, "a text or None")
    return [result]


def _wrong(stage: UserStage, result: object, place: Place, wanted: str) -> DataError:
    return DataError(
        f"stage {stage.function} returned {_shape(result)} for {place}.", hint=f"A {stage.kind} stage returns {wanted}."
    )


def _shape(result: object) -> str:
    length = f" of {len(result)}" if isinstance(result, list | tuple) else ""
    return f"{type(result).__name__}{length}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}".rstrip(": .")
