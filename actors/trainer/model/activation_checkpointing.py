"""Activation checkpointing and compilation, layer by layer.

Both replace a layer's `forward`. Parameters thus keep their names, and FSDP's hooks stay outside: FSDP gathers weights
before the replaced `forward` runs, and again before activations are recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from raytide.core.specs.train import MemorySpec

aten = torch.ops.aten
_KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Operations whose results selective checkpointing keeps: most of the compute, less than half of the bytes."""


def checkpoint_layer(layer: nn.Module, memory: MemorySpec) -> None:
    """Makes the layer recompute its activations in the backward pass, if the spec asks for it."""
    if memory.checkpointing == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is random
    if memory.checkpointing == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    wrap(layer, lambda forward: functools.partial(checkpoint, forward, **options))


def compile_layer(layer: nn.Module, memory: MemorySpec) -> None:
    """Compiles the layer to one graph, if the spec asks for it. The shapes in the layer do not change, except that the
    batch size may change when a run starts.
    """
    if memory.compile:
        wrap(layer, lambda forward: torch.compile(forward, backend=memory.compile_backend, fullgraph=True))


def wrap(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the module's `forward` by the result of `around(forward)`."""
    module.forward = around(module.forward)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
