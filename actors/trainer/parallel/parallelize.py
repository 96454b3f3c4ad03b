"""Builds a model on a gang. Applies tensor, context and pipeline parallelism, shards the model with FSDP2, and loads
the initial weights.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.naming import NAMES
from raytide.actors.models.quantized.targets import check_groups, quantized_linears
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.hf.init_weights import load_or_initialise
from raytide.actors.trainer.hf.model_source import ModelSource
from raytide.actors.trainer.hf.weight_mapping import FamilyFormat, file_tensors
from raytide.actors.trainer.model import apply, precision
from raytide.actors.trainer.model.activation_offload import ActivationPool
from raytide.actors.trainer.model.fake_quantize import prepare
from raytide.actors.trainer.model.lora import adapt
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.parallel import context_parallel, parameter_offload, tensor_parallel
from raytide.core.specs.model import QatSpec
from raytide.core.specs.train import TrainSpec


def build_model_parts(
    spec: TrainSpec, origin: ModelSource, group: ProcessGroup, pool: ActivationPool | None = None
) -> list[Transformer]:
    """Returns this rank's parts of the model with their initial weights. The parts are the rank's pipeline stages, or
    the whole model if there is no pipeline.

    `pool` stores offloaded activations.
    """
    parts = []
    for stage in spec.layout.stages_of(group.pipeline_rank):
        with torch.device("meta"):
            part = Transformer(origin.arch, spec.seq_len, spec.layout.stage_layers(stage, origin.arch.num_layers))
            adapt(part, spec.finetune)
            if spec.qat is not None:
                prepare(part, spec.qat, qat_targets(origin.arch, spec.qat), precision.export_dtype(spec))
        if group.sizes.tensor > 1:
            tensor_parallel.divide(part, group.mesh["tensor"], spec.seq_len)
        context_parallel.divide(part, group, spec.seq_len)
        apply.apply_memory_options(part, spec, pool)
        shard(part, spec, group)
        parameter_offload.allocate(part, spec.memory, group.device)
        load_or_initialise(part, origin, spec.seed)
        parts.append(part)
    return parts


def shard(part: Transformer, spec: TrainSpec, group: ProcessGroup) -> None:
    """Shards a model part with FSDP. Each layer is one FSDP unit, and all other parameters form one more unit."""
    policy = precision.policy(spec.precision)
    mesh = group.mesh["shard"] if spec.replicas_reduce_themselves else group.data_mesh
    is_copy = mesh.shape[-1] > 1 or spec.memory.parameters != "none"  # else a single rank would copy for nothing
    frees = spec.layout.frees_after_forward and is_copy
    offload = parameter_offload.offload_policy(spec.memory, group.device)
    for layer in part.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=frees)
    fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)


def qat_targets(arch: Architecture, qat: QatSpec) -> set[str]:
    """Returns the paths of those modules of the model that are to be quantised. Modules that a file stacks into one
    tensor are quantised together.

    Raises ConfigError for a model family without a quantised format. Also raises ConfigError for a group size that
    does not divide the number of a layer's inputs.
    """
    linears = quantized_linears(arch, NAMES[arch.names].root, qat.skip)
    tensors = {tensor.name: tensor for tensor in file_tensors(arch, FamilyFormat.on_the_hub(arch))}
    check_groups(qat.group_size, lambda name: tensors[name].shape, linears)
    return {piece.parameter.removesuffix(".weight") for name in linears for piece in tensors[f"{name}.weight"].slices}
