"""Low-rank adapters (Hu et al. 2021), added to a model before it is sharded.

The model's own parameters keep their names and are frozen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from raytide.actors.models.architecture import Architecture
from raytide.actors.trainer.model.transformer import Transformer
from raytide.core.errors import ConfigError
from raytide.core.specs.model import FinetuneSpec, LoraSpec

LORA_A, LORA_B = "lora_a.weight", "lora_b.weight"


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank adapter: y = x W^T + bias + (x A^T) B^T * scale.

    Only A and B are trained. B starts at zero.
    """

    def __init__(self, base: nn.Linear, lora: LoraSpec) -> None:
        device = base.weight.device
        super().__init__(base.in_features, base.out_features, base.bias is not None, device)
        self.requires_grad_(False)
        self.scale = lora.alpha / lora.rank
        self.lora_a = nn.Linear(base.in_features, lora.rank, bias=False, device=device)
        self.lora_b = nn.Linear(lora.rank, base.out_features, bias=False, device=device)

    def forward(self, input: Tensor) -> Tensor:
        added: Tensor = self.lora_b(self.lora_a(input))
        return F.linear(input, self.weight, self.bias) + added * self.scale


def adapt(part: Transformer, finetune: FinetuneSpec | None) -> None:
    """Freezes the model part and adds adapters to its projections. Does nothing if the spec does not ask for
    finetuning.
    """
    if finetune is None:
        return
    part.requires_grad_(False)
    adapted_paths = set(adapted(part.arch, finetune.lora))
    for name, module in list(part.named_modules()):
        if name in adapted_paths:
            assert isinstance(module, nn.Linear)
            parent, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(parent), leaf, LoraLinear(module, finetune.lora))


def adapted(arch: Architecture, lora: LoraSpec) -> list[str]:
    """Returns the paths of the linear modules that get an adapter. Raises ConfigError for a target in `lora` that the
    model does not have.
    """
    paths = [path for path in _linears(arch) if lora.targets is None or path.rpartition(".")[2] in lora.targets]
    for target in lora.targets or ():
        if not any(path.endswith(f".{target}") for path in paths):
            raise ConfigError(
                f"the model has no {target} that can have an adapter.",
                hint="Remove it from finetune.lora.targets; with experts only attention projections get one.",
            )
    return paths


def merged(weight: Tensor, a_RI: Tensor, b_OR: Tensor, lora: LoraSpec) -> Tensor:
    """Returns the weight plus its adapter: `weight + B @ A * (alpha / rank)`."""
    return weight + b_OR @ a_RI * (lora.alpha / lora.rank)


def _linears(arch: Architecture) -> Iterator[str]:
    ffn = ("gate_proj", "up_proj", "down_proj") if arch.gated_ffn else ("up_proj", "down_proj")
    for index in range(arch.num_layers):
        yield from (f"layers.{index}.attention.{each}_proj" for each in "qkvo")
        if arch.experts is None:  # in a model with experts PEFT would mistake a dense layer's for an expert's
            yield from (f"layers.{index}.ffn.{each}" for each in ffn)
