"""Apply what the spec says of precision and memory to a model's layers, and refuse what this device would not do."""

from __future__ import annotations

import functools

import torch

from raytide.actors.trainer import fp8, offload, remat
from raytide.actors.trainer.decoder import Decoder
from raytide.actors.trainer.loss import loss_sum
from raytide.core.errors import ConfigError
from raytide.core.train_spec import TrainSpec

__all__ = ["apply", "check"]


def check(spec: TrainSpec, device: torch.device) -> None:
    """ConfigError for a technique that would fail on the device, or do nothing there."""
    if spec.precision == "fp8":
        fp8.check_device(device)
    if device.type == "cpu":
        for field in ("activations", "optimizer"):
            if getattr(spec.memory, field) == "cpu":
                raise ConfigError(
                    f'memory.{field} "cpu" frees nothing on a CPU: they are there already.',
                    hint=f'Set memory.{field} to "disk", or to "none".',
                )


def apply(part: Decoder, spec: TrainSpec, pool: offload.Pool | None) -> None:
    """To each layer, after tensor parallelism and before FSDP, whose hooks stay outside of it all."""
    if spec.memory.loss_chunk:
        part.loss = functools.partial(loss_sum, chunk=spec.memory.loss_chunk)
    for layer in part.layers.values():
        if spec.precision == "fp8" and fp8.convert(layer) == 0:
            raise ConfigError(
                f'precision "fp8" needs layers whose widths are multiples of {fp8.MULTIPLE}; {spec.name} has none.',
                hint='Train in "bf16", or choose such widths.',
            )
        remat.remat(layer, spec.memory)
        remat.compile_layer(layer, spec.memory)
        if pool is not None:
            offload.offload(layer, pool, spec.memory.offload_min_bytes)
