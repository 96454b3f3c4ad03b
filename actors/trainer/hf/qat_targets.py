"""The linear modules of a model whose weights will be quantised when it is exported."""

from __future__ import annotations

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.naming import NAMES
from raytide.actors.models.quantized.targets import check_groups, quantized_linears
from raytide.actors.trainer.hf.weight_mapping import FamilyFormat, file_tensors
from raytide.core.specs.model import QatSpec


def qat_targets(arch: Architecture, qat: QatSpec) -> set[str]:
    """Returns the modules' paths in the model. Those that a file stacks are quantised together.

    Raises ConfigError for a family without a quantised format, and for a group that does not divide a layer's inputs.
    """
    linears = quantized_linears(arch, NAMES[arch.names].root, qat.skip)
    tensors = {tensor.name: tensor for tensor in file_tensors(arch, FamilyFormat.on_the_hub(arch))}
    check_groups(qat.group_size, lambda name: tensors[name].shape, linears)
    return {piece.parameter.removesuffix(".weight") for name in linears for piece in tensors[f"{name}.weight"].slices}
