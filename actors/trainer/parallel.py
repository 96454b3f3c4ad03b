"""Put a model on a gang: shard it with FSDP2 and give every parameter its first value, shard by shard.

A parameter's first value depends on the seed and its name alone, so that every layout starts from the same model and
no rank ever holds all of it.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from raytide.actors.models.architecture import Architecture
from raytide.actors.trainer.decoder import Decoder
from raytide.actors.trainer.group import Group
from raytide.core.train_spec import Precision, TrainSpec

__all__ = ["INIT_STD", "build", "initialise", "shard"]

INIT_STD = 0.02


def build(spec: TrainSpec, arch: Architecture, group: Group) -> list[Decoder]:
    """The parts of the sharded model of `spec` that this rank has, with their first weights."""
    with torch.device("meta"):
        model = Decoder(arch, spec.seq_len)
    shard(model, group, spec.precision)
    model.to_empty(device=group.device)
    initialise(model, spec.seed)
    return [model]


def shard(model: Decoder, group: Group, precision: Precision) -> None:
    """One FSDP unit for each layer and one for the rest. Weights and gradient sums stay fp32; bf16 is for compute."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = policy if precision == "bf16" else MixedPrecisionPolicy()
    alone = group.world == 1  # nothing to free: resharding would only copy
    for layer in model.layers.values():
        fully_shard(layer, mesh=group.data_mesh, mp_policy=policy, reshard_after_forward=not alone)
    fully_shard(model, mesh=group.data_mesh, mp_policy=policy, reshard_after_forward=False)


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Normal(0, 0.02), less by sqrt(2 * layers) for what writes to the residual stream (GPT-2); norms start at one."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            first = 0.0 if name.endswith("bias") else 1.0 - model.arch.norm_offset
            full = torch.full(parameter.shape, first)
        else:
            residual = "o_proj" in name or "down_proj" in name
            std = INIT_STD / (2 * model.arch.num_layers) ** 0.5 if residual else INIT_STD
            full = torch.empty(parameter.shape).normal_(0.0, std, generator=_generator(seed, name))
        parameter.copy_(_like(full, parameter))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _like(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of `full`, cut without communication: every rank made the same `full`."""
    if not isinstance(parameter, DTensor):
        return full.to(parameter.device)
    placed = full.to(parameter.device)
    return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)
