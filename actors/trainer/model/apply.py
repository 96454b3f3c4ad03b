"""Applies the spec's precision and memory options to a model's layers. Rejects options that the device does not
support.
"""

from __future__ import annotations

import functools

import torch

from raytide.actors.trainer.model import activation_checkpointing, activation_offload, float8
from raytide.actors.trainer.model.loss import loss_sum
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.run_log import recordings
from raytide.core.errors import ConfigError
from raytide.core.specs.train import TrainSpec


def check_supported(spec: TrainSpec, device: torch.device) -> None:
    """Raises ConfigError for an option that fails on the device or has no effect there."""
    if spec.precision == "fp8":
        float8.check_device(device)
    if device.type == "cuda" and spec.memory.compile and spec.masks_documents:
        raise ConfigError(
            "memory.compile cannot be combined with document masks on a GPU: FlexAttention compiles itself.",
            hint="Leave memory.compile out, or set document_masks to false.",
        )
    if spec.profile is not None:
        recordings.check_device(spec.profile.what, device)
    if device.type == "cpu":
        for field in ("activations", "optimizer", "parameters"):
            if getattr(spec.memory, field) == "cpu":
                raise ConfigError(
                    f'memory.{field} "cpu" frees no memory when training on a CPU.',
                    hint=f'Set memory.{field} to "disk", or to "none".',
                )


def apply_memory_options(part: Transformer, spec: TrainSpec, pool: activation_offload.ActivationPool | None) -> None:
    """Applies the precision and memory options to each layer. Call it after tensor parallelism and before FSDP, because
    FSDP's hooks must be outermost.
    """
    if spec.memory.loss_chunk:
        part.loss = functools.partial(loss_sum, chunk=spec.memory.loss_chunk)
    for layer in part.layers.values():
        if spec.precision == "fp8" and float8.convert(layer) == 0:
            raise ConfigError(
                f'precision "fp8" needs layer widths that are multiples of {float8.MULTIPLE}; {spec.name} has none.',
                hint='Set precision "bf16", or change the widths.',
            )
        activation_checkpointing.checkpoint_layer(layer, spec.memory)
        activation_checkpointing.compile_layer(layer, spec.memory)
        if pool is not None:
            activation_offload.offload(layer, pool, spec.memory.offload_min_bytes)
