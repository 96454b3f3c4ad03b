"""Put a model on a gang: shard it with FSDP2, then give every rank the first weights of its shards."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from raytide.actors.trainer.decoder import Decoder
from raytide.actors.trainer.group import Group
from raytide.actors.trainer.lora import adapt
from raytide.actors.trainer.origin import Origin
from raytide.actors.trainer.start import first_weights
from raytide.core.train_spec import Precision, TrainSpec

__all__ = ["build", "shard"]


def build(spec: TrainSpec, origin: Origin, group: Group) -> list[Decoder]:
    """The parts of the sharded model of `spec` that this rank has, with their first weights."""
    with torch.device("meta"):
        model = Decoder(origin.arch, spec.seq_len)
        adapt(model, spec.finetune)
    shard(model, group, spec.precision)
    model.to_empty(device=group.device)
    first_weights(model, origin, spec.seed)
    return [model]


def shard(model: Decoder, group: Group, precision: Precision) -> None:
    """One FSDP unit for each layer and one for the rest. Weights and gradient sums stay fp32; bf16 is for compute."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = policy if precision == "bf16" else MixedPrecisionPolicy()
    alone = group.world == 1  # nothing to free: resharding would only copy
    for layer in model.layers.values():
        fully_shard(layer, mesh=group.data_mesh, mp_policy=policy, reshard_after_forward=not alone)
    fully_shard(model, mesh=group.data_mesh, mp_policy=policy, reshard_after_forward=False)
