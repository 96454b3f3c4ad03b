"""Keeps weights and gradients in host memory or in memory-mapped files, for models that are larger than the device.

FSDP gathers a layer's weights before the layer runs and frees the weights afterwards. It reduces the layer's
gradients at the end of the layer's backward pass. For weights on a disk, the weights of the next layers are read
ahead while one layer runs. Weights that are no longer needed are dropped from memory (ZeRO-Infinity, arXiv
2104.07857).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from raytide.actors.trainer.distributed.local_shards import like, local
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.optim.state_offload import DiskStorage, read_ahead, release
from raytide.core.specs.train import MemorySpec

AHEAD = 2
"""The number of layers that are read ahead of the one that runs."""


def offload_policy(memory: MemorySpec, device: torch.device) -> OffloadPolicy:
    """Returns FSDP's offload policy. In training on a CPU, nothing is offloaded, because the weights are already in
    host memory.
    """
    if memory.parameters == "none" or device.type == "cpu":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=memory.parameters == "cpu")


def allocate(part: Transformer, memory: MemorySpec, device: torch.device) -> None:
    """Allocates the tensors of a sharded model whose tensors are on the meta device. The spec chooses the place: the
    device, host memory or a file.
    """
    if memory.parameters != "disk":
        part.to_empty(device=device if memory.parameters == "none" else torch.device("cpu"))
        return
    storage = DiskStorage(memory.scratch)

    def allocated(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return torch.empty_like(tensor, device=device)
        return like(storage.empty(tensor.to_local().shape, tensor.dtype), tensor)

    part._apply(allocated)  # type: ignore[no-untyped-call]
    for parameter in part.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_GradientMover(storage))
    _read_layers_ahead(part)


class _GradientMover:
    """A hook that moves the reduced gradient of one parameter to the disk."""

    def __init__(self, storage: DiskStorage) -> None:
        self._storage = storage
        self._place: Tensor | None = None

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        here = local(gradient)
        if self._place is None:
            self._place = self._storage.empty(here.shape, here.dtype)
        if here.data_ptr() != self._place.data_ptr():  # else a further micro-batch was added to it there
            self._place.copy_(here)
            parameter.grad = like(self._place, gradient)
        release(self._place)


def _read_layers_ahead(part: Transformer) -> None:
    """While a layer runs, reads ahead the layers that run next, in both directions, and drops those that have run."""
    layers: list[nn.Module] = list(part.layers.values())
    weights = [[local(weight) for weight in layer.parameters()] for layer in layers]
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(_forward_hook(weights, index))
        layer.register_forward_hook(_backward_hook(weights, index))


def _forward_hook(weights: Sequence[Sequence[Tensor]], index: int) -> Callable[..., None]:
    def before(layer: nn.Module, inputs: Any) -> None:
        _page(weights, ahead=range(index + 1, index + 1 + AHEAD))

    return before


def _backward_hook(weights: Sequence[Sequence[Tensor]], index: int) -> Callable[..., None]:
    def before(gradient: Tensor) -> None:
        _page(weights, ahead=range(index - 1, index - 1 - AHEAD, -1), behind=index + 1)

    def after_forward(layer: nn.Module, inputs: Any, output: Any) -> None:
        _page(weights, behind=index)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(before)

    return after_forward


def _page(weights: Sequence[Sequence[Tensor]], *, ahead: range = range(0), behind: int = -1) -> None:
    for index in ahead:
        if 0 <= index < len(weights):
            for weight in weights[index]:
                read_ahead(weight)
    if 0 <= behind < len(weights):
        for weight in weights[behind]:
            release(weight)
