"""DCP planners for tensor shards. They choose the rank that writes each shard, and the stored shards that fill a new
layout.

DCP's own planners take state dicts of DTensors. These planners take lists of shards. A shard may also be a copy in
memory, or a tensor that is not a DTensor (pipeline stages, quantized state).
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
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from raytide.actors.trainer.checkpoint.train_state import TensorShard
from raytide.core.errors import CheckpointError


class ShardSavePlanner(DefaultSavePlanner):
    def __init__(self, shards: Sequence[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = {MetadataIndex(shard.name, shard.offsets): shard for shard in shards}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(index, shard) for index, shard in self._shards.items()])

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._shards[write_item.index].local


class ShardLoadPlanner(DefaultLoadPlanner):
    def __init__(self, shards: Sequence[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return LoadPlan(read_items(self._shards, self.metadata.state_dict_metadata))

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return destination(self._shards, read_item)


def read_items(shards: Sequence[TensorShard], stored: dict[str, Any]) -> list[ReadItem]:
    """Returns the reads that fill these shards. The `dest_index` of a read is the position of its shard in `shards`.
    The shard's name cannot serve as the index, because tied parameters have the same name.

    Raises CheckpointError if a stored tensor is missing or has another shape.
    """
    items: list[ReadItem] = []
    for position, shard in enumerate(shards):
        stored_tensor = stored.get(shard.name)
        if stored_tensor is None and shard.optional:
            continue
        if not isinstance(stored_tensor, TensorStorageMetadata):
            raise CheckpointError(f"it has no {shard.name}.", hint="Resume with the spec that wrote it.")
        if tuple(stored_tensor.size) != shard.shape:
            raise CheckpointError(
                f"{shard.name} is {list(stored_tensor.size)} in the checkpoint and {list(shard.shape)} in the model.",
                hint="Resume with the spec that wrote it.",
            )
        position_index = MetadataIndex(str(position))
        chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.local.size())
        chunk_items = create_read_items_for_chunk_list(shard.name, stored_tensor, [chunk])
        items += [replace(item, dest_index=position_index) for item in chunk_items]
    return items


def destination(shards: Sequence[TensorShard], item: ReadItem) -> Tensor:
    """Returns the part of a shard's tensor that a read item fills."""
    return narrow(shards[int(item.dest_index.fqn)].local, item.dest_offsets, item.lengths)


def narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _write_item(index: MetadataIndex, shard: TensorShard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.local.size())
    properties = TensorProperties(dtype=shard.local.dtype)
    return WriteItem(
        index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, torch.Size(shard.shape))
    )
