"""Tiny Llamas with quantized projections, each beside the plain model that holds the same weights dequantized."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.actors.engine.tiny import save_llama
from transformers import LlamaForCausalLM

Tensors = dict[str, torch.Tensor]
Quantizer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""It returns a module's tensors by the last part of their names, and the weight that they stand for."""

PROMPT = [5, 17, 200, 3, 88, 42, 9, 301, 7, 64]


def save_quantized(
    folder: Path, quantize: Quantizer, config: dict[str, Any], only: str = "_proj", **overrides: Any
) -> LlamaForCausalLM:
    """Saves a tiny Llama whose projections are quantized. Returns it with the weights that its files stand for."""
    folder.mkdir(exist_ok=True)
    model = save_llama(folder, **{"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, **overrides})
    tensors = load_file(folder / "model.safetensors")
    for name, module in modules_of(model, only):
        found, weight = quantize(module.weight.data)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{suffix}": value.contiguous() for suffix, value in found.items()}
        module.weight.data = weight.float()
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, quantization_config=config)
    return model


def modules_of(model: LlamaForCausalLM, only: str) -> Iterator[tuple[str, torch.nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and only in name:
            yield name, module


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    body = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in body.items() if value is not None}))


def change_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def expected_logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]
