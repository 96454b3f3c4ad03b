"""Measures a model's activations on calibration text, with the trainer's forward pass in float32.

Shape suffixes: B batch, T time, F features, D model width, H heads, C head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.families import architecture_of
from raytide.actors.trainer.hf.init_weights import load_or_initialise
from raytide.actors.trainer.hf.model_source import ModelSource
from raytide.actors.trainer.model.transformer import FeedForward, Transformer, TransformerBlock
from raytide.core.errors import DataError
from raytide.pipelines.compress.layer_files import plain_config

_BATCH = 8
"""The number of windows in a batch, over which the L2 norm is computed before the mean over tokens."""


@dataclass(slots=True)
class Importance:
    """The importance of a model's parts as Minitron defines it: the L2 norm of activations over a batch, averaged over
    tokens.
    """

    hidden_D: Tensor
    ffn_LF: list[Tensor]
    """The neurons' importance by layer; an empty tensor for a sparse (mixture-of-experts) layer."""
    heads_LH: list[Tensor]
    layers_L: Tensor
    """1 - the cosine similarity of each layer's input and output."""


def open_model(source: Path, window: int) -> tuple[Transformer, Architecture, torch.device]:
    config = plain_config(source)
    arch = architecture_of(config, str(source / "config.json"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Transformer(arch, window).to(device).eval()
    load_or_initialise(model, ModelSource(config, arch, source, ""), seed=0)
    return model, arch, device


def measure_importance(
    source: Path, windows: list[list[int]], on_progress: Callable[[int, int], None] = lambda done, of: None
) -> Importance:
    """Returns the importance of every neuron, head, hidden dimension and layer, measured with forward passes alone."""
    model, arch, device = open_model(source, max(map(len, windows)))
    found = Importance(
        hidden_D=torch.zeros(arch.hidden_size, device=device),
        ffn_LF=[torch.zeros(0, device=device) for _ in arch.layers],
        heads_LH=[torch.zeros(arch.num_heads, device=device) for _ in arch.layers],
        layers_L=torch.zeros(arch.num_layers, device=device),
    )
    weight, handles = [0.0], list[torch.utils.hooks.RemovableHandle]()

    def norm_hook(_: nn.Module, __: object, out_BTD: Tensor) -> None:
        found.hidden_D += weight[0] * out_BTD.square().sum(0).sqrt().mean(0)

    def watch(index: int, layer: TransformerBlock) -> Iterator[torch.utils.hooks.RemovableHandle]:
        def heads(_: nn.Module, args: tuple[Tensor]) -> None:
            norms_BTH = args[0].unflatten(-1, (arch.num_heads, arch.head_dim)).square().sum(-1)
            found.heads_LH[index] += weight[0] * norms_BTH.sum(0).sqrt().mean(0)

        def neurons(_: nn.Module, args: tuple[Tensor]) -> None:
            found.ffn_LF[index] += weight[0] * args[0].square().sum(0).sqrt().mean(0)

        def change(_: nn.Module, args: tuple[Tensor, ...], out_BTD: Tensor) -> None:
            cosine = torch.cosine_similarity(args[0], out_BTD, dim=-1).mean()
            found.layers_L[index] += weight[0] * (1 - cosine)

        yield layer.attention.o_proj.register_forward_pre_hook(heads)
        if isinstance(layer.ffn, FeedForward):
            found.ffn_LF[index] = torch.zeros(arch.ffn_size, device=device)
            yield layer.ffn.down_proj.register_forward_pre_hook(neurons)
        yield layer.register_forward_hook(change)
        yield layer.input_norm.register_forward_hook(norm_hook)
        yield layer.ffn_norm.register_forward_hook(norm_hook)

    for index, layer in enumerate(model.layers.values()):
        assert isinstance(layer, TransformerBlock)
        handles += watch(index, layer)
    total = sum(map(len, windows))
    for batch_BT in _batches(windows, device):
        weight[0] = batch_BT.numel() / total
        forward(model, batch_BT)
        on_progress(batch_BT.numel(), total)
    for handle in handles:
        handle.remove()
    if not all(each.isfinite().all() for each in (found.hidden_D, found.layers_L, *found.heads_LH, *found.ffn_LF)):
        raise DataError(f"{source} has activations that are not finite.", hint="Its weights are broken.")
    return found


def measure_input_norms(source: Path, windows: list[list[int]]) -> dict[str, Tensor]:
    """Returns the L2 norms of all inputs of each linear layer, by the layer's name in the trainer."""
    model, _, device = open_model(source, max(map(len, windows)))
    squares: dict[str, Tensor] = {}

    def watch(name: str, linear: nn.Linear) -> None:
        squares[name] = torch.zeros(linear.in_features, device=device)

        def add(_: nn.Module, args: tuple[Tensor]) -> None:
            squares[name] += args[0].flatten(0, -2).square().sum(0)

        linear.register_forward_pre_hook(add)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            watch(name, module)
    for batch_BT in _batches(windows, device):
        forward(model, batch_BT)
    return {name: each.sqrt().cpu() for name, each in squares.items()}


@torch.inference_mode()
def forward(model: Transformer, ids_BT: Tensor) -> None:
    """Runs the model's layers without computing the head's logits."""
    model(ids_BT, torch.full_like(ids_BT, -100))


def _batches(windows: list[list[int]], device: torch.device) -> Iterator[Tensor]:
    """Yields windows of equal length together, so that nothing is padded."""
    by_length: dict[int, list[list[int]]] = {}
    for window in windows:
        by_length.setdefault(len(window), []).append(window)
    for rows in by_length.values():
        for at in range(0, len(rows), _BATCH):
            yield torch.tensor(rows[at : at + _BATCH], device=device)
