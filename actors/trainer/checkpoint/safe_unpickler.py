"""Reads the pickle in a checkpoint's `.metadata` file as data. Nothing in the pickle is imported or called.

Torch's distributed checkpoint (DCP) writes this file with pickle. Unpickling an untrusted file would run any code that
the file names. This reader accepts only the names that occur in DCP's metadata. It returns each object as its arguments
and state, and `dcp/metadata.py` converts them to DCP's classes. This module does not import torch.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from raytide.core.errors import CheckpointError

MAX_BYTES = 1 << 30
"""The size limit of `.metadata` in bytes: a million shards take 0.13 GiB."""

_METADATA = "torch.distributed.checkpoint.metadata"
_NUMBERS = """float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
    int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex32 complex64 complex128"""
_CLASSES = """Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex
    StorageMeta _MEM_FORMAT_ENCODING"""
_PLAIN = """PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT
    BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 UNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST
    APPEND APPENDS EMPTY_DICT MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL"""

DTYPES = frozenset(_NUMBERS.split())
ALLOWED: dict[tuple[str, str], str] = {
    **{(_METADATA, name): name for name in _CLASSES.split()},
    **{("torch", name): name for name in DTYPES},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "_StorageInfo",
    ("torch", "Size"): "Size",
    ("torch.serialization", "_get_layout"): "_get_layout",
    ("pathlib", "PosixPath"): "PosixPath",
    ("pathlib._local", "PosixPath"): "PosixPath",
    ("builtins", "getattr"): "getattr",
}
"""The names that a metadata file may contain, by module and name, with the names used here. `getattr` is how Python
3.11.0 to 3.11.3 pickle a member of an enumeration; it is accepted for `_MEM_FORMAT_ENCODING` alone, and never called.
"""

_HINT = "Delete the folder and find its writer: the run then resumes from the previous checkpoint."


class GlobalName:
    """The name of a class or function in the pickle."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class PickledObject:
    """An object in the pickle. Unpickling it would call `name` with `args` and then set `state`."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[object, ...]) -> None:
        self.name, self.args = name, args
        self.state: object = None


def read(body: bytes, where: str) -> object:
    """Returns the pickle as a tree of plain values, GlobalNames and PickledObjects. Raises CheckpointError for a pickle
    that is not DCP's metadata.
    """
    if len(body) > MAX_BYTES:
        raise CheckpointError(f"{where} has {len(body)} bytes, above the limit of {MAX_BYTES}.", hint=_HINT)
    try:
        return _Reader(io.BytesIO(body)).load()
    except _ForeignNameError as error:
        raise CheckpointError(
            f"{where} was crafted: it names {error}, which is not allowed in checkpoint metadata.", hint=_HINT
        ) from None
    except (Exception, RecursionError, MemoryError) as error:  # a hostile pickle may fail in any of these ways
        raise CheckpointError(
            f"{where} is not checkpoint metadata: {type(error).__name__}: {error}.", hint=_HINT
        ) from None


class _ForeignNameError(Exception):
    pass


class _Reader(pickle._Unpickler):
    """The standard library's Python unpickler, without the operations that call, import or allocate by index.

    The C version would allocate memory for any memo index that a file names.
    """

    dispatch: ClassVar[dict[int, Callable[..., Any]]] = {}
    stack: list[Any]
    append: Callable[[object], None]

    if TYPE_CHECKING:

        def pop_mark(self) -> list[object]: ...

    def find_class(self, module: str, name: str) -> GlobalName:
        known = ALLOWED.get((module, name))
        if known is None:
            raise _ForeignNameError(f"{module}.{name}"[:200])
        return GlobalName(known)

    def make(self) -> None:
        args = self.stack.pop()
        made = self.stack.pop()
        if not isinstance(made, GlobalName) or not isinstance(args, tuple):
            raise TypeError("it calls something that is not a metadata class")
        if made.name == "getattr":
            of, member = args
            if not isinstance(of, GlobalName) or of.name != "_MEM_FORMAT_ENCODING" or not isinstance(member, str):
                raise _ForeignNameError("builtins.getattr")
            made, args = of, (member,)
        self.append(PickledObject(made.name, args))

    def build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if not isinstance(made, PickledObject) or made.state is not None:
            raise TypeError("it sets the state of something that is not a metadata object")
        made.state = state

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def set_items(self) -> None:
        self._put(self.pop_mark())

    def _put(self, items: list[object]) -> None:
        into = self.stack[-1]
        if not isinstance(into, dict):
            raise TypeError("it puts an item into something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | PickledObject):  # hashing deeply nested tuples would overflow the stack
                raise TypeError(f"a key is a {type(key).__name__}")
            if isinstance(value, GlobalName) and value.name == "getattr":
                raise _ForeignNameError("builtins.getattr")
            into[key] = value


def _operations() -> dict[int, Callable[..., Any]]:
    """Returns the opcode table: the library's operations for plain values, others for those that make objects."""
    library: dict[int, Callable[..., Any]] = pickle._Unpickler.dispatch
    found = {getattr(pickle, name)[0]: library[getattr(pickle, name)[0]] for name in _PLAIN.split()}
    found |= {pickle.REDUCE[0]: _Reader.make, pickle.NEWOBJ[0]: _Reader.make, pickle.BUILD[0]: _Reader.build}
    return found | {pickle.SETITEM[0]: _Reader.set_item, pickle.SETITEMS[0]: _Reader.set_items}


_Reader.dispatch = _operations()
