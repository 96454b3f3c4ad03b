"""Builds a run's optimizer. The optimizer is one object for all parameters, in any layout."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from raytide.actors.trainer.optim.adafactor import Adafactor
from raytide.actors.trainer.optim.adamw import AdamW
from raytide.actors.trainer.optim.adamw8bit import AdamW8bit
from raytide.actors.trainer.optim.base import Optimizer
from raytide.actors.trainer.optim.lamb import Lamb
from raytide.actors.trainer.optim.muon import Muon
from raytide.actors.trainer.optim.state_offload import create_storage
from raytide.core.specs.train import MemorySpec, OptimSpec

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "adafactor": Adafactor,
    "lamb": Lamb,
    "muon": Muon,
}


def build(parameters: Iterable[tuple[str, nn.Parameter]], spec: OptimSpec, memory: MemorySpec) -> Optimizer:
    """Returns the optimizer of the named parameters, with initialized state. Frozen parameters are left out."""
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    return OPTIMIZERS[spec.name](trainable, spec, create_storage(memory.optimizer, memory.scratch))
