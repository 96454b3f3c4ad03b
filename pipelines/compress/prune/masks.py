"""Sets weights to zero, for research: the tensors keep their size, and no kernel here or in vLLM skips zeros."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raytide.actors.models.families import architecture_of
from raytide.actors.models.naming import NAMES
from raytide.actors.trainer.hf.weight_mapping import FamilyFormat, FileTensor, HfWeights, file_tensors, to_hf_tensor
from raytide.kernels.device import DTYPES
from raytide.pipelines.compress.calibration import calibration_windows
from raytide.pipelines.compress.layer_files import by_layer, plain_config
from raytide.pipelines.compress.prune.activations import measure_input_norms
from raytide.pipelines.compress.recipe import MaskStep
from raytide.pipelines.compress.step_task import StepTask


def run_mask(step: MaskStep, task: StepTask) -> None:
    """Writes the model with the least important weights of each output at zero. Head, embeddings and experts stay."""
    source = task.source
    config = plain_config(source)
    arch = architecture_of(config, str(source / "config.json"))
    norms = measure_input_norms(source, calibration_windows(task.recipe, source)) if step.method == "wanda" else {}
    weights, dtype = HfWeights(source, arch), DTYPES[arch.dtype]
    form = FamilyFormat.on_the_hub(arch)
    tensors: dict[str, FileTensor] = {each.name: each for each in file_tensors(arch, form)}
    prefixes = [form.root + NAMES[arch.names].layer.format(index) for index in range(arch.num_layers)]
    groups = by_layer(list(tensors), prefixes)

    def parameter(name: str) -> Tensor:
        full, module = weights.whole(name), name.removesuffix(".weight")
        is_projection = name.startswith("layers.") and module.endswith("_proj") and name.endswith(".weight")
        return masked(full, step, norms.get(module)) if is_projection and full.dim() == 2 else full

    def layer(at: int) -> Mapping[str, Tensor]:
        return {name: to_hf_tensor(tensors[name], parameter).to(dtype) for name in groups[at]}

    files = task.files()
    files.write(len(groups), layer, on_layer=lambda at, of: task.on_progress("mask: files", at, of))
    files.finish(config, source, {"step": "mask", "options": step.model_dump(mode="json")})


def masked(weight_NK: Tensor, step: MaskStep, norms_K: Tensor | None) -> Tensor:
    """Returns the weight with zeros where |w|, or for Wanda |w| times the norm of its input, is least in its row."""
    scores_NK = weight_NK.abs() if norms_K is None else weight_NK.abs() * norms_K
    n, k = scores_NK.shape
    if step.pattern is not None:
        scores, zeros = scores_NK[:, : k - k % 4].reshape(n, -1, 4), 2
    else:
        assert step.sparsity is not None  # as the recipe made sure
        scores, zeros = scores_NK[:, None], round(step.sparsity * k)
    least = scores.topk(zeros, dim=-1, largest=False).indices
    mask = torch.ones_like(scores).scatter_(-1, least, 0.0).reshape(n, -1)
    if mask.shape[1] < k:
        mask = torch.cat((mask, mask.new_ones(n, k - mask.shape[1])), 1)
    return weight_NK * mask
