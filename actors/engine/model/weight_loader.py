"""Builds a decoder's layers from a model directory's weights, by the names of its family.

Projections that read the same input are stacked (qkv, gate and up), so that each is one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.loader import Weights
from raytide.actors.models.naming import NAMES, Names, Projection, projections
from raytide.kernels.core import HeadNorms, NormWeights
from raytide.kernels.registry import Ops

Tensor = torch.Tensor
Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SparseFfn:
    """The router's logits [T, E], and the weighted sum of the chosen experts (operator `experts`)."""

    router: Linear
    experts: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights. Its feed-forward is `sparse`, or `gate_up` (GPT-2: only up) and `down`."""

    input_norm: NormWeights
    qkv: Linear
    head_norms: HeadNorms | None
    attention_out: Linear
    post_attention_norm: NormWeights | None
    ffn_norm: NormWeights
    gate_up: Linear | None
    down: Linear | None
    sparse: SparseFfn | None
    post_ffn_norm: NormWeights | None


class WeightLoader:
    """Reads weights in the engine's layout and dtype. Raises DataError for missing ones."""

    def __init__(self, arch: Architecture, weights: Weights, ops: Ops) -> None:
        self._arch, self._weights, self._ops = arch, weights, ops
        self._names: Names = NAMES[arch.names]
        full = f"{self._names.root}{self._names.embedding}.weight"
        self._root = self._names.root if full in weights else ""

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
        if self._arch.tied_embeddings:
            return self._ops.linear(embedding, None)
        return self._ops.linear(self._get(self._names.head, self._arch.vocab_size, self._arch.hidden_size), None)

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
        """Returns 1 + weight, as Gemma's norms use it."""
        offset = self._arch.norm_offset
        return (weight.float() + offset).to(weight.dtype) if offset else weight

    def _linear(self, at: str, by: Projection) -> Linear:
        rows = list(by.rows)
        bias = self._weights.stack([f"{at}{path}.bias" for path in by.paths], rows) if by.bias else None
        if self._names.transposed:
            (path,), (size,) = by.paths, rows
            return self._ops.linear(self._get(at + path, by.columns, size).t().contiguous(), bias)
        return self._ops.linear(
            self._weights.stack([f"{at}{path}.weight" for path in by.paths], rows, by.columns), bias
        )

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
        return SparseFfn(
            router=self._ops.linear(self._get(at + router, experts.count, arch.hidden_size), None),
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
