"""Builds a decoder's layers from the weights of a model directory, by the weight names of the model's family.

Projections that read the same input are stacked (q, k and v; gate and up), so that each stack is one matrix product.
Quantized projections of different formats are not stacked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.naming import NAMES, Names, Projection, projections
from raytide.actors.models.quantized.model_weights import ModelWeights
from raytide.actors.models.quantized.stacking import can_stack, stacked
from raytide.kernels.core import (
    HeadNorms,
    LayerWeights,
    Linear,
    LinearInput,
    NormWeights,
    QuantizedWeight,
    SideBySide,
    SparseFfn,
    round_to_nearest,
)
from raytide.kernels.registry import Ops

Tensor = torch.Tensor

_HEAD_GROUP = 32
_UNPACKED_BYTES = 8
"""The bytes of memory for each code that reading a quantized weight takes before it is packed again."""


@dataclass(frozen=True, slots=True)
class QuantizedOptions:
    """The options of quantized models. `input` is the number format of the inputs of linear layers. If `rounds_head` is
    True, the output head is rounded to int8. If `rounds_kv` is True, the KV cache is rounded to int8.
    """

    input: LinearInput = "float"
    rounds_head: bool = False
    rounds_kv: bool = False


class WeightLoader:
    """Builds a model's layers from its weights. The layers have the engine's layout and dtype. Raises DataError if
    weights are missing.

    `options` say how to compute with quantized weights.
    """

    def __init__(self, arch: Architecture, weights: ModelWeights, ops: Ops, options: QuantizedOptions) -> None:
        self._arch, self._weights, self._ops, self._options = arch, weights, ops, options
        self._is_quantized = self._rounds_head = False
        self.built_bytes = 0
        """The bytes of all matrices built so far, in the form that they are computed with."""
        self.scratch_bytes = 0
        """The most bytes that building one matrix took in addition to the result: its parts as stored in the file, and
        stacked.
        """
        self._names: Names = NAMES[arch.names]
        self._prefix = "" if arch.vision is None else "language_model."
        root = self._prefix + self._names.root
        self._root = root if f"{root}{self._names.embedding}.weight" in weights else self._prefix

    def embedding(self) -> Tensor:
        return self._get(self._root + self._names.embedding, self._arch.vocab_size, self._arch.hidden_size)

    def positions(self) -> Tensor | None:
        arch = self._arch
        if not arch.learned_positions:
            return None
        return self._get(self._root + self._names.positions, arch.max_model_len, arch.hidden_size)

    def final_norm(self) -> NormWeights:
        return self._norm(self._root + self._names.norm)

    def head(self, embedding: Tensor) -> Linear:
        """Returns the output head, built from its own weight or from the embedding's weight. Call it after the layers
        are built. A head that llm-compressor quantized has its own weight, even if the config ties the head to the
        embedding.
        """
        if self._arch.num_labels:
            return self._plain(self._get("score", self._arch.num_labels, self._arch.hidden_size), None)
        shape = (self._arch.vocab_size, self._arch.hidden_size)
        name = self._prefix + self._names.head
        quantized = self._weights.quantized(name, *shape)
        is_tied = self._arch.tied_embeddings or self._is_headless(name)
        if quantized is None and is_tied:
            quantized = self._weights.quantized(self._root + self._names.embedding, *shape)
        if quantized is not None:
            return self._integer(quantized, None)
        weight = embedding if is_tied else self._get(name, *shape)
        self._rounds_head = self._is_quantized and self._options.rounds_head and shape[1] % _HEAD_GROUP == 0
        if not self._rounds_head:
            return self._plain(weight, None)
        return self._integer(round_to_nearest(weight, 8, _HEAD_GROUP), None)

    def _is_headless(self, name: str) -> bool:
        """Returns whether the files are those of a model that only embeds, saved without its head, as of
        Qwen3-Embedding-8B. As in llama.cpp, the embedding then stands for the head.
        """
        return not self._root and not self._prefix and f"{name}.weight" not in self._weights

    @property
    def quantization(self) -> str:
        """The formats of the quantized layers built so far, and the format of the layers' inputs. Empty for a model
        without quantized layers.
        """
        found = self._weights.quantization
        if not found:
            return ""
        head = f", head rounded to int8 g{_HEAD_GROUP}" if self._rounds_head else ""
        return f"{found}{head}; computed with {self._options.input if self._is_quantized else 'float'} inputs"

    def check_all_read(self) -> None:
        self._weights.check_all_read()

    def layer(self, index: int) -> LayerWeights:
        arch, names = self._arch, self._names
        at = self._root + names.layer.format(index)
        linears = {name: self._linear(at, each) for name, each in projections(arch, index).items()}
        return LayerWeights(
            input_norm=self._norm(at + names.input_norm),
            qkv=linears["qkv"],
            head_norms=self._head_norms(at) if arch.head_norms else None,
            attention_out=linears["attention_out"],
            post_attention_norm=self._norm(at + names.post_attention_norm) if arch.post_norms else None,
            ffn_norm=self._norm(at + names.ffn_norm),
            gate_up=linears.get("gate_up"),
            down=linears.get("down"),
            sparse=self._sparse(at) if arch.layers[index].sparse else None,
            post_ffn_norm=self._norm(at + names.post_ffn_norm) if arch.post_norms else None,
        )

    def _get(self, path: str, *shape: int) -> Tensor:
        return self._weights.get(f"{path}.weight", *shape)

    def _norm(self, path: str) -> NormWeights:
        arch = self._arch
        bias = self._weights.get(f"{path}.bias", arch.hidden_size) if arch.norm_kind == "layer" else None
        return NormWeights(self._offset(self._get(path, arch.hidden_size)), bias, arch.norm_eps, arch.norm_kind)

    def _head_norms(self, at: str) -> HeadNorms:
        arch, names = self._arch, self._names
        q, k = (self._offset(self._get(at + name, arch.head_dim)) for name in (names.query_norm, names.key_norm))
        return HeadNorms(q, k, arch.norm_eps)

    def _offset(self, weight: Tensor) -> Tensor:
        """Returns 1 + weight if the family's norms multiply by that, as Gemma's do; else the weight."""
        offset = self._arch.norm_offset
        return (weight.float() + offset).to(weight.dtype) if offset else weight

    def _linear(self, at: str, by: Projection) -> Linear:
        rows = list(by.rows)
        bias = self._weights.stack([f"{at}{path}.bias" for path in by.paths], rows) if by.bias else None
        parts = [
            self._weights.quantized(at + path, size, by.columns) for path, size in zip(by.paths, rows, strict=True)
        ]
        if any(part is not None for part in parts):
            self._is_quantized = True
            return self._quantized(at, by, parts, bias)
        if self._names.transposed:
            (path,), (size,) = by.paths, rows
            return self._plain(self._get(at + path, by.columns, size).t().contiguous(), bias)
        return self._plain(self._weights.stack([f"{at}{path}.weight" for path in by.paths], rows, by.columns), bias)

    def _plain(self, weight: Tensor, bias: Tensor | None) -> Linear:
        self.built_bytes += weight.nbytes
        self.scratch_bytes = max(self.scratch_bytes, 2 * weight.nbytes)
        return self._ops.linear(weight, bias)

    def _integer(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        numbers = [weight.scales_NG] if weight.offsets_NG is None else [weight.scales_NG, weight.offsets_NG]
        codes = weight.codes_NK.numel()
        self.built_bytes += codes * weight.bits // 8 + sum(each.nbytes for each in numbers)
        self.scratch_bytes = max(self.scratch_bytes, _UNPACKED_BYTES * codes)
        return self._ops.quantized_linear(weight, bias, self._options.input)

    def _quantized(self, at: str, by: Projection, parts: list[QuantizedWeight | None], bias: Tensor | None) -> Linear:
        """Returns the linear of a projection of which at least one part is quantized. Adjacent parts are stacked where
        their formats allow it; the others have products of their own.
        """
        runs: list[list[QuantizedWeight] | Tensor] = []
        for path, size, part in zip(by.paths, by.rows, parts, strict=True):
            if part is None:
                runs.append(self._get(at + path, size, by.columns))
            elif runs and isinstance(runs[-1], list) and can_stack(runs[-1][0], part):
                runs[-1].append(part)
            else:
                runs.append([part])
        linears, first = list[Linear](), 0
        for run in runs:
            whole = stacked(run) if isinstance(run, list) else run
            rows = whole.codes_NK.shape[0] if isinstance(whole, QuantizedWeight) else whole.shape[0]
            own_bias = None if bias is None else bias[first : first + rows].contiguous()
            first += rows
            linears.append(
                self._integer(whole, own_bias) if isinstance(whole, QuantizedWeight) else self._plain(whole, own_bias)
            )
        return linears[0] if len(linears) == 1 else SideBySide(linears)

    def _sparse(self, at: str) -> SparseFfn:
        arch, names = self._arch, self._names
        experts = arch.experts
        assert experts is not None
        router = next((path for path in names.routers if f"{at}{path}.weight" in self._weights), names.routers[0])
        gate_up, down = (
            self._fused_experts(at, experts.count, experts.ffn_size)
            if f"{at}{names.fused_gate_up}" in self._weights
            else self._single_experts(at, experts.count, experts.ffn_size)
        )
        self.built_bytes += gate_up.nbytes + down.nbytes
        self.scratch_bytes = max(self.scratch_bytes, 2 * gate_up.nbytes)
        return SparseFfn(
            router=self._plain(self._get(at + router, experts.count, arch.hidden_size), None),
            experts=self._ops.experts(gate_up, down, arch.activation),
        )

    def _fused_experts(self, at: str, count: int, ffn: int) -> tuple[Tensor, Tensor]:
        names, hidden = self._names, self._arch.hidden_size
        gate_up = self._weights.get(at + names.fused_gate_up, count, 2 * ffn, hidden)
        return gate_up, self._weights.get(at + names.fused_down, count, hidden, ffn)

    def _single_experts(self, at: str, count: int, ffn: int) -> tuple[Tensor, Tensor]:
        names, hidden = self._names, self._arch.hidden_size
        gate_up = [
            self._weights.stack([f"{at}{path.format(i)}.weight" for path in names.expert_gate_up], [ffn, ffn], hidden)
            for i in range(count)
        ]
        down = [self._get(at + names.expert_down.format(i), hidden, ffn) for i in range(count)]
        return torch.stack(gate_up), torch.stack(down)
