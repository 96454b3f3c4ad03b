"""The DCP planners of our pieces: who writes what, and which stored pieces fill which of a new layout's.

DCP's own planners take state dicts of DTensors; ours take pieces, so that copies in memory and tensors that are no
DTensors (pipeline stages, quantised state) go the same way.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from raytide.actors.trainer.checkpoint.train_state import TensorShard
from raytide.core.errors import CheckpointError


class ShardSavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: Sequence[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {MetadataIndex(piece.name, piece.offsets): piece for piece in pieces}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(index, piece) for index, piece in self._pieces.items()])

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._pieces[write_item.index].local


class ShardLoadPlanner(DefaultLoadPlanner):
    def __init__(self, pieces: Sequence[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return LoadPlan(read_items(self._pieces, self.metadata.state_dict_metadata))

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return destination(self._pieces, read_item)


def read_items(pieces: Sequence[TensorShard], stored: dict[str, Any]) -> list[ReadItem]:
    """What fills these pieces. The `dest_index` of an item is the piece's position: names may stand twice (tied).

    CheckpointError for a tensor that is not stored, or in another shape.
    """
    items: list[ReadItem] = []
    for position, piece in enumerate(pieces):
        found = stored.get(piece.name)
        if found is None and piece.optional:
            continue
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"it has no {piece.name}.", hint="Go on with the spec that wrote it.")
        if tuple(found.size) != piece.shape:
            raise CheckpointError(
                f"{piece.name} is {list(found.size)} there and {list(piece.shape)} here.",
                hint="Go on with the spec that wrote it.",
            )
        here = MetadataIndex(str(position))
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.local.size())
        fills = create_read_items_for_chunk_list(piece.name, found, [chunk])
        items += [replace(item, dest_index=here) for item in fills]
    return items


def destination(pieces: Sequence[TensorShard], item: ReadItem) -> Tensor:
    """The part of a piece that an item fills."""
    return narrow(pieces[int(item.dest_index.fqn)].local, item.dest_offsets, item.lengths)


def narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _write_item(index: MetadataIndex, piece: TensorShard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.local.size())
    properties = TensorProperties(dtype=piece.local.dtype)
    return WriteItem(
        index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, torch.Size(piece.shape))
    )
