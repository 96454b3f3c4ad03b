"""Quantises a model's linear layers by rounding to nearest. Writes compressed-tensors, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.families import architecture_of
from raytide.actors.models.loader import Weights
from raytide.actors.models.naming import NAMES
from raytide.actors.models.quantized.codes import RoundedWeight, packed, round_fp8, round_integers
from raytide.actors.models.quantized.targets import check_groups, expert_patterns, quantized_linears
from raytide.actors.trainer.hf.weight_mapping import FamilyFormat, HfWeights
from raytide.core.errors import DataError
from raytide.kernels.device import DTYPES
from raytide.pipelines.compress.layer_files import LayerFiles, by_layer, plain_config
from raytide.pipelines.compress.recipe import RtnStep

Tensor = torch.Tensor


def run_rtn(step: RtnStep, source: Path, files: LayerFiles, on_layer: Callable[[int, int], None]) -> None:
    """Writes the quantised model.

    Raises DataError if a tensor does not belong to the architecture or a weight is not finite. Raises ConfigError if
    the group size does not divide the inputs of a layer.
    """
    config = plain_config(source)
    arch = architecture_of(config, str(source / "config.json"))
    HfWeights(source, arch)  # raises for tensors that are missing, stray or of another shape
    weights = Weights(source, torch.float32, torch.device("cpu"))
    root = FamilyFormat.from_names(arch, weights.names).root
    linears = quantized_linears(arch, root, step.skip)
    check_groups(step.group_size, weights.shape, linears)
    prefixes = [root + NAMES[arch.names].layer.format(index) for index in range(arch.num_layers)]
    groups, dtype = by_layer(_kept(weights, arch), prefixes), DTYPES[arch.dtype]

    def layer(at: int) -> Mapping[str, Tensor]:
        written: dict[str, Tensor] = {}
        for name in groups[at]:
            tensor = weights.get(name, *weights.shape(name))
            if not tensor.isfinite().all():
                raise DataError(f"{source}: weight {name} is not finite.", hint="The model is broken: train it again.")
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module in linears:
                written |= _tensors_of(module, tensor, step, dtype)
            else:
                written[name] = tensor.to(dtype)
        return written

    files.write(len(groups), layer, on_layer=on_layer)
    skipped = sorted(quantized_linears(arch, root, ()) - linears)
    files.finish({**config, "quantization_config": quantization_config(step, arch, skipped)}, source, {"step": "rtn"})


def quantization_config(step: RtnStep, arch: Architecture, skipped: list[str]) -> dict[str, object]:
    """Returns the `quantization_config` section of config.json, in the format of compressed-tensors."""
    group, activations = step.group_size, None
    kind = "float" if step.scheme == "fp8" else "int"
    if step.scheme in ("w8a8", "fp8"):
        activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    weights = {
        "num_bits": step.bits,
        "type": kind,
        "symmetric": step.symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
    }
    form = {"w8a8": "int-quantized", "fp8": "float-quantized"}.get(step.scheme, "pack-quantized")
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
                "format": form,
            }
        },
        "ignore": ["lm_head", *expert_patterns(arch), *skipped],
        "kv_cache_scheme": None,
    }


def _tensors_of(module: str, weight_NK: Tensor, step: RtnStep, dtype: torch.dtype) -> dict[str, Tensor]:
    rounded = _round(weight_NK, step, dtype)
    if not rounded.scale_NG.isfinite().all():
        name = str(dtype).removeprefix("torch.")
        raise DataError(f"{module}: a scale is not finite in {name}.", hint="Use bfloat16 weights.")
    found = {f"{module}.weight_scale": rounded.scale_NG}
    if step.scheme in ("w8a8", "fp8"):
        return {**found, f"{module}.weight": rounded.codes_NK}
    bits = step.bits
    found[f"{module}.weight_packed"] = packed(rounded.codes_NK, bits)
    found[f"{module}.weight_shape"] = torch.tensor(weight_NK.shape, dtype=torch.int64)
    if rounded.zero_NG is not None:  # packed along the outputs
        found[f"{module}.weight_zero_point"] = packed(rounded.zero_NG.t(), bits).t()
    return found


def _round(weight_NK: Tensor, step: RtnStep, dtype: torch.dtype) -> RoundedWeight:
    if step.scheme == "fp8":
        return round_fp8(weight_NK, dtype)
    return round_integers(weight_NK, step.bits, step.group_size, dtype, symmetric=step.symmetric)


def _kept(weights: Weights, arch: Architecture) -> list[str]:
    """Returns the names of tensors to write. Copies of tied embeddings and old tables of rotary embeddings are left
    out.
    """
    head = f"{NAMES[arch.names].head}.weight"
    return [
        name
        for name in weights.names
        if not (arch.tied_embeddings and name == head) and not name.endswith(".rotary_emb.inv_freq")
    ]
