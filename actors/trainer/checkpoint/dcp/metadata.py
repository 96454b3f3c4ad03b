"""Builds the metadata of torch's distributed checkpoint (DCP) from an untrusted file. Every field is checked and
nothing is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from raytide.actors.trainer.checkpoint.safe_unpickler import DTYPES, GlobalName, PickledObject, read
from raytide.core.errors import CheckpointError

_MAX_DIMS = 64


def metadata_of(body: bytes, sizes: Mapping[str, int], where: str) -> Metadata:
    """Returns the metadata in `body`, the content of a `.metadata` file. `sizes` maps the names of shard files to their
    sizes in bytes.

    Raises CheckpointError if the metadata is malformed or points outside the shard files.
    """
    tree = read(body, where)
    try:
        return _Builder(sizes, 1000 + 4 * len(body)).metadata(tree)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"{where} is not checkpoint metadata: {error}.",
            hint="Delete the folder: the run then resumes from the previous checkpoint.",
        ) from None


class _Builder:
    def __init__(self, sizes: Mapping[str, int], budget: int) -> None:
        self._sizes, self._budget = sizes, budget
        """`_budget` is the number of values that may still be created: a small file that refers to one list repeatedly
        could create any number.
        """

    def metadata(self, tree: object) -> Metadata:
        state = _state(tree, "Metadata")
        tensors = {_text(key): self._stored(value) for key, value in _mapping(state["state_dict_metadata"]).items()}
        places = dict(self._place(key, value) for key, value in _mapping(state["storage_data"]).items())
        return Metadata(state_dict_metadata=tensors, storage_data=places, storage_meta=StorageMeta())

    def _stored(self, value: object) -> TensorStorageMetadata | BytesStorageMetadata:
        if isinstance(value, PickledObject) and value.name == "BytesStorageMetadata":
            return BytesStorageMetadata()
        state = _state(value, "TensorStorageMetadata")
        chunks = state["chunks"]
        if not isinstance(chunks, list):
            raise TypeError("the chunks of a tensor are not a list")
        properties = TensorProperties(dtype=_dtype(state["properties"]))
        return TensorStorageMetadata(properties, self._size(state["size"]), [self._chunk(chunk) for chunk in chunks])

    def _chunk(self, value: object) -> ChunkStorageMetadata:
        state = _state(value, "ChunkStorageMetadata")
        return ChunkStorageMetadata(self._size(state["offsets"]), self._size(state["sizes"]))

    def _place(self, key: object, value: object) -> tuple[MetadataIndex, _StorageInfo]:
        index, info = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
        offset, hint = index.get("offset"), index.get("index")
        file, start, length = _text(info["relative_path"]), _count(info["offset"]), _count(info["length"])
        if file not in self._sizes:
            raise ValueError(f"it stores a shard in {file[:200]!r}, which is not a file of this checkpoint")
        if start + length > self._sizes[file]:
            raise ValueError(f"it stores a shard beyond the end of {file}")
        if info.get("transform_descriptors"):
            raise ValueError(f"it stores a transformed shard in {file}")
        place = None if offset is None else self._size(offset)
        made = MetadataIndex(_text(index["fqn"]), place, None if hint is None else _count(hint))
        return made, _StorageInfo(file, start, length)

    def _size(self, value: object) -> torch.Size:
        if not isinstance(value, PickledObject) or value.name != "Size" or len(value.args) != 1:
            raise TypeError("a size is not a torch.Size")
        numbers = value.args[0]
        if not isinstance(numbers, tuple | list) or len(numbers) > _MAX_DIMS:
            raise TypeError(f"a size is not a list, or has more than {_MAX_DIMS} dimensions")
        self._budget -= 1 + len(numbers)
        if self._budget < 0:
            raise ValueError("it describes more shards than its bytes can hold")
        return torch.Size([_count(number) for number in numbers])


def _state(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, PickledObject) or value.name != name or not isinstance(value.state, dict):
        raise TypeError(f"a {name} is missing or malformed")
    return value.state


def _dtype(properties: object) -> torch.dtype:
    if not isinstance(properties, PickledObject) or properties.name != "TensorProperties":
        raise TypeError("a tensor has no properties")
    state = properties.state
    if not isinstance(state, tuple) or not state or not isinstance(state[0], GlobalName) or state[0].name not in DTYPES:
        raise TypeError("a tensor has no valid dtype")
    found: torch.dtype = getattr(torch, state[0].name)
    return found


def _mapping(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise TypeError("a mapping is not a dict")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is not a string")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError("a number is negative, too large or not an integer")
    return value
