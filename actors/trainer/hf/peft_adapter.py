"""Converts adapters to PEFT's format, for transformers, vLLM and the native engine.

Some tensors in the files stack several projections. The adapters of these projections are stacked to one adapter, whose
rank is the sum of their ranks. All adapters are then padded with zeros to the same rank, because not every reader
supports a different rank per module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.naming import NAMES
from raytide.actors.trainer.hf.weight_mapping import FamilyFormat, FileTensor, file_tensors
from raytide.actors.trainer.model.lora import LORA_A, LORA_B, adapted
from raytide.core.specs.model import LoraSpec


@dataclass(frozen=True, slots=True)
class FileAdapter:
    """The adapter of one module in the exported files. `parts` lists the projections in the module, each with its first
    row and its path in the model.
    """

    module: str
    rank: int
    inputs: int
    outputs: int
    parts: tuple[tuple[int, str], ...]

    @property
    def parameters(self) -> list[str]:
        """The names of the model's parameters from which the adapter is built."""
        return [f"{path}.{kind}" for _, path in self.parts for kind in (LORA_A, LORA_B)]

    def pair(self, whole: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the adapter's matrices lora_A [rank, inputs] and lora_B [outputs, rank]. `whole` returns a full
        parameter by its name.
        """
        a_RI, b_OR = torch.zeros(self.rank, self.inputs), torch.zeros(self.outputs, self.rank)
        column = 0
        for row, path in self.parts:
            part_a, part_b = whole(f"{path}.{LORA_A}"), whole(f"{path}.{LORA_B}")
            rank = part_a.shape[0]
            a_RI[column : column + rank] = part_a
            b_OR[row : row + part_b.shape[0], column : column + rank] = part_b
            column += rank
        return a_RI, b_OR


def file_adapters(arch: Architecture, lora: LoraSpec) -> list[FileAdapter]:
    paths = set(adapted(arch, lora))
    found = [(tensor, _parts(tensor, paths)) for tensor in file_tensors(arch, FamilyFormat.on_the_hub(arch))]
    rank = lora.rank * max(len(parts) for _, parts in found)
    return [_adapter(tensor, parts, rank) for tensor, parts in found if parts]


def adapter_config(arch: Architecture, lora: LoraSpec, adapters: Sequence[FileAdapter], base: str) -> dict[str, object]:
    """Returns the content of PEFT's `adapter_config.json`. `base` is the name of the adapted model."""
    names, rank = NAMES[arch.names], adapters[0].rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": lora.alpha / lora.rank * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": names.transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": list(dict.fromkeys(_in_layer(each.module) for each in adapters)),
    }


def _adapter(tensor: FileTensor, parts: tuple[tuple[int, str], ...], rank: int) -> FileAdapter:
    rows, columns = tensor.shape if not tensor.transposed else tensor.shape[::-1]
    return FileAdapter(tensor.name.removesuffix(".weight"), rank, columns, rows, parts)


def _parts(tensor: FileTensor, paths: Collection[str]) -> tuple[tuple[int, str], ...]:
    named = [(piece.start, piece.parameter.removesuffix(".weight")) for piece in tensor.slices]
    return tuple((start, path) for start, path in named if path in paths)


def _in_layer(module: str) -> str:
    """Returns `self_attn.q_proj` for `model.layers.3.self_attn.q_proj`."""
    path = module.split(".")
    return ".".join(path[next(at for at, part in enumerate(path) if part.isdigit()) + 1 :])
