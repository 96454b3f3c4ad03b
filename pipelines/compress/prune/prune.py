"""Removes the least important neurons, hidden dimensions, heads and layers, and writes the rest as an ordinary model.

The kept hidden dimensions are the same in the whole model. The kept neurons and heads differ between layers. A KV head
is removed together with all of its query heads. The size of a head never changes, because rotary embeddings need it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.families import architecture_of
from raytide.actors.models.naming import NAMES
from raytide.actors.trainer.hf.weight_mapping import FamilyFormat, FileTensor, HfWeights, file_tensors, to_hf_tensor
from raytide.core.errors import ConfigError
from raytide.kernels.device import DTYPES
from raytide.pipelines.compress.layer_files import by_layer, plain_config
from raytide.pipelines.compress.prune.activations import Importance, measure_importance, measure_input_norms
from raytide.pipelines.compress.recipe import MaskStep, PruneStep
from raytide.pipelines.compress.step_task import StepTask, calibration_windows

_CHOICE = ".kept.json"
"""The file in an unfinished directory that lists the parts to keep, so that a resumed step does not measure again."""
_FIELDS = {
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_size": ("intermediate_size", "n_inner"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", ""),
    "num_layers": ("num_hidden_layers", "n_layer"),
}

_NO_HEAD_DIM = ("gpt2", "phi3")
"""Families whose loaders always divide the width by the number of heads, even if the config has a head size."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The indices of the parts that pruning keeps, in ascending order."""

    layers: list[int]
    hidden: list[int]
    ffn: list[list[int]]
    """The kept neurons of each layer of the model before pruning; an empty list for a sparse (mixture-of-experts)
    layer.
    """
    kv_groups: list[list[int]]


def run_prune(step: PruneStep, task: StepTask) -> None:
    source = task.source
    config = plain_config(source)
    arch = architecture_of(config, str(source / "config.json"))
    _check(step, arch, source)
    files = task.files()
    kept = _choice(files.folder / _CHOICE, step, arch, task)
    smaller_config = pruned_config(config, arch, kept)
    smaller = architecture_of(smaller_config, f"the pruned {source}")
    if smaller.layers != tuple(arch.layers[index] for index in kept.layers):
        raise ConfigError(
            f"{source}: the kinds of its layers follow from their numbers, which pruning changes.",
            hint="Leave layers at 1.",
        )
    weights, dtype = HfWeights(source, arch), DTYPES[arch.dtype]
    form = FamilyFormat.on_the_hub(arch)
    tensors = {each.name: each for each in file_tensors(smaller, form)}
    prefixes = [form.root + NAMES[arch.names].layer.format(index) for index in range(smaller.num_layers)]
    groups = by_layer(list(tensors), prefixes)

    def parameter(name: str) -> Tensor:
        return pruned_parameter(name, weights, arch, kept)

    def layer(at: int) -> Mapping[str, Tensor]:
        return {name: to_hf_tensor(tensors[name], parameter).to(dtype) for name in groups[at]}

    files.write(len(groups), layer, on_layer=lambda at, of: task.on_progress("prune: files", at, of))
    (files.folder / _CHOICE).unlink()
    files.finish(smaller_config, source, {"step": "prune", "kept": asdict(kept)})


def choose(step: PruneStep, arch: Architecture, importance: Importance) -> Kept:
    """Returns the parts to keep: the most important ones. The step's shares decide how many are kept."""
    heads_per_group = arch.num_heads // arch.num_kv_heads
    return Kept(
        layers=_top(importance.layers_L, max(1, round(step.layers * arch.num_layers))),
        hidden=_top(importance.hidden_D, _size(step.hidden, arch.hidden_size, step.multiple, "hidden")),
        ffn=[
            _top(each, _size(step.ffn, arch.ffn_size, step.multiple, "ffn")) if len(each) else []
            for each in importance.ffn_LF
        ],
        kv_groups=[
            _top(each.unflatten(0, (-1, heads_per_group)).sum(-1), max(1, round(step.kv_groups * arch.num_kv_heads)))
            for each in importance.heads_LH
        ],
    )


def pruned_config(config: Mapping[str, object], arch: Architecture, kept: Kept) -> dict[str, object]:
    """Returns the model's config with the sizes after pruning."""
    groups = len(kept.kv_groups[0])
    sizes = {
        "hidden_size": len(kept.hidden),
        "num_heads": groups * (arch.num_heads // arch.num_kv_heads),
        "num_kv_heads": groups,
        "num_layers": len(kept.layers),
        "ffn_size": next((len(each) for each in kept.ffn if each), arch.ffn_size),
    }
    written = dict(config)
    for size, value in sizes.items():
        name = _FIELDS[size][1 if arch.names == "gpt2" else 0]
        if name:
            written[name] = value
    if arch.names != "gpt2":
        written["head_dim"] = arch.head_dim  # else it would follow from the width
    for name in ("layer_types", "no_rope_layers"):
        if isinstance(of_layers := config.get(name), list):
            written[name] = [of_layers[index] for index in kept.layers]
    return written


def pruned_parameter(name: str, weights: HfWeights, arch: Architecture, kept: Kept) -> Tensor:
    """Returns a parameter of the pruned model, in float32. `name` is the parameter's name in the pruned model."""
    hidden = torch.tensor(kept.hidden)
    if not name.startswith("layers."):
        return weights.whole(name).index_select(-1, hidden)
    _, at, part = name.split(".", 2)
    index = kept.layers[int(at)]
    full = weights.whole(f"layers.{index}.{part}")
    module, _, kind = part.rpartition(".")
    rows, columns = _indices(module, index, arch, kept)
    if rows is not None:
        full = full.index_select(0, rows)
    return full if columns is None or kind == "bias" else full.index_select(-1, columns)


def _indices(module: str, index: int, arch: Architecture, kept: Kept) -> tuple[Tensor | None, Tensor | None]:
    """Returns the rows and columns of a module's weight that stay; None for all."""
    hidden, groups = torch.tensor(kept.hidden), torch.tensor(kept.kv_groups[index])
    kv = _spread(groups, arch.head_dim)
    query = _spread(groups, arch.head_dim * (arch.num_heads // arch.num_kv_heads))
    ffn = torch.tensor(kept.ffn[index])
    of_module: dict[str, tuple[Tensor | None, Tensor | None]] = {
        "attention.q_proj": (query, hidden),
        "attention.k_proj": (kv, hidden),
        "attention.v_proj": (kv, hidden),
        "attention.o_proj": (hidden, query),
        "attention.q_norm": (None, None),
        "attention.k_norm": (None, None),
        "ffn.gate_proj": (ffn, hidden),
        "ffn.up_proj": (ffn, hidden),
        "ffn.down_proj": (hidden, ffn),
    }
    if arch.layers[index].sparse and module.startswith("ffn"):
        return None, None
    return of_module.get(module, (hidden, None))  # the norms


def _spread(groups: Tensor, size: int) -> Tensor:
    return (groups[:, None] * size + torch.arange(size)).flatten()


def _choice(path: Path, step: PruneStep, arch: Architecture, task: StepTask) -> Kept:
    if path.exists():
        return Kept(**json.loads(path.read_text()))
    windows, done = calibration_windows(task.recipe, task.source), 0

    def on_progress(tokens: int, of: int) -> None:
        nonlocal done
        done += tokens
        task.on_progress("prune: tokens", done, of)

    kept = choose(step, arch, measure_importance(task.source, windows, on_progress))
    staged = path.with_name(f"{path.name}.part")
    staged.write_text(json.dumps(asdict(kept)))
    staged.rename(path)
    return kept


def _top(importance: Tensor, count: int) -> list[int]:
    found: list[int] = importance.topk(count).indices.sort().values.tolist()
    return found


def _size(share: float, size: int, multiple: int, field: str) -> int:
    if share == 1.0:
        return size
    if size < 2 * multiple:
        raise ConfigError(
            f"{field} cannot be cut from {size} to a multiple of {multiple}.", hint="Lower multiple in the prune step."
        )
    return min(size, max(multiple, round(share * size / multiple) * multiple))


def _check(step: PruneStep, arch: Architecture, source: Path) -> None:
    """Raises ConfigError if the step would cut parts that the architecture needs."""
    problems = {
        "ffn": step.ffn < 1 and arch.experts is not None and "its feed-forward layers are experts",
        "hidden": step.hidden < 1
        and (
            (arch.experts is not None and "its feed-forward layers are experts")
            or (arch.embedding_scale != 1.0 and "its embeddings are scaled by its width")
            or (arch.names in _NO_HEAD_DIM and "the size of its heads follows from its width")
        ),
        "kv_groups": step.kv_groups < 1
        and arch.names in _NO_HEAD_DIM
        and "the size of its heads follows from their number",
    }
    for field, why in problems.items():
        if why:
            raise ConfigError(f"{source}: {field} cannot be pruned, because {why}.", hint=f"Leave {field} at 1.")


def run_mask(step: MaskStep, task: StepTask) -> None:
    """Sets the least important weights of each output to zero, and writes the model. Head, embeddings and experts stay
    unchanged.

    This is for research: the tensors keep their size, and neither raytide's kernels nor vLLM's skip zeros.
    """
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
    """Returns the weight with some elements set to zero: the elements with the lowest scores in each row. With the
    pattern 2:4, these are the two elements with the lowest scores in each group of four neighbours.

    The score of an element w is |w|. For the method Wanda, it is |w| times the norm of the input by which w is
    multiplied.
    """
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
