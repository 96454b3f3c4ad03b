"""Writes tensors, as they arrive, into the safetensors files of a Hugging Face directory. Each file has a size
limit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from raytide.actors.trainer.hf.weight_mapping import FileTensor


class ShardedSafetensorsWriter:
    """Writes tensors into safetensors files of limited size.

    It holds the tensors of at most one file in memory. Tensors must arrive in the order of `tensors`.
    """

    def __init__(self, tensors: Sequence[FileTensor], dtype: torch.dtype, limit_bytes: float) -> None:
        self._dtype = dtype
        self._groups = _groups(tensors, dtype.itemsize, limit_bytes)
        self._pending: dict[str, Tensor] = {}
        self._done = 0

    def add(self, folder: Path, name: str, tensor: Tensor) -> None:
        self._pending[name] = tensor.to(self._dtype).contiguous()
        if len(self._pending) == len(self._groups[self._done]):
            save(self._pending, folder / self._file(self._done))
            self._pending = {}
            self._done += 1

    def close(self, folder: Path) -> None:
        """Writes the index if there is more than one file."""
        if len(self._groups) == 1:
            return
        of = {tensor.name: self._file(at) for at, group in enumerate(self._groups) for tensor in group}
        total = sum(prod(tensor.shape) for group in self._groups for tensor in group) * self._dtype.itemsize
        body = {"metadata": {"total_size": total}, "weight_map": of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=2) + "\n")

    def _file(self, at: int) -> str:
        count = len(self._groups)
        return "model.safetensors" if count == 1 else f"model-{at + 1:05d}-of-{count:05d}.safetensors"


def save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates files that only the owner can read


def _groups(tensors: Sequence[FileTensor], itemsize: int, limit_bytes: float) -> list[list[FileTensor]]:
    groups: list[list[FileTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = prod(tensor.shape) * itemsize
        if groups[-1] and filled + size > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    return groups
