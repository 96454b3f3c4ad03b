"""The sizes of a decoder-only model: each of its weights, and the compute per token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Side = Literal["rows", "columns", "whole"]
"""The side of a weight that tensor parallelism divides: its outputs, its inputs, or none."""


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """The shape of one weight. `division` is the dimension that tensor parallelism divides, or None if every rank has
    the whole weight.
    """

    module: str
    """The last part of the module's name: q_proj, ffn_norm, embedding."""
    shape: tuple[int, ...]
    division: int | None = None
    is_hidden: bool = False
    """True for a matrix of a layer, which Muon orthogonalizes."""
    is_trained: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer, as numbers of elements."""

    name: str = "model"
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    layer_norms: bool = False
    """True for LayerNorm, whose norms have a bias; False for RMSNorm."""
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    head_norms: bool = False
    post_norms: bool = False
    positions: int = 0
    """The number of learned positions; 0 for rotary ones."""
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    sparse_layers: tuple[int, ...] = ()
    """The layers with experts."""
    windows: tuple[int, ...] = ()
    """The windows of the layers with a sliding window, in tokens. All other layers have full attention."""
    weight_bytes: float = 2.0
    """The mean bytes of a weight when the model is served: 2 in bfloat16, less if it is quantized."""

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """The total number of weights. If the head is tied to the embedding, the shared weights count once."""
        return sum(weight.numel for weight in self.weights(range(self.layers)))

    @property
    def matrix_parameters(self) -> int:
        """The number of weights in the matrices by which a token is multiplied.

        Embedding, norms and biases do not count. In a mixture of experts, only the experts that the token uses
        count.
        """
        attention = 2 * self.width * (self.attention_width + self.kv_width)
        sparse = len(self.sparse_layers)
        dense_ffn = (3 if self.gated else 2) * self.width * self.ffn
        sparse_ffn = self.width * self.experts + self.experts_per_token * 3 * self.width * self.expert_ffn
        layers = self.layers * attention + (self.layers - sparse) * dense_ffn + sparse * sparse_ffn
        return layers + self.vocab * self.width

    @property
    def active_parameters(self) -> int:
        """The number of weights that a token uses: all except the experts to which the token is not routed.

        Published formulas for serving use this number.
        """
        unused = len(self.sparse_layers) * (self.experts - self.experts_per_token) * 3 * self.width * self.expert_ffn
        return self.parameters - unused

    def flops_per_token(self, seq_len: int, *, frozen: bool = False) -> float:
        """Returns the FLOPs per token of the forward and the backward pass with full attention: 6 N' + 12 L a d s
        (PaLM, appendix B).

        N' is `matrix_parameters`. `L` is the number of layers, `a` the number of heads, `d` the head dimension, and `s`
        the sequence length, or `windowed_span` in a layer with a window. With `frozen` only adapters are trained.
        Frozen weights have no gradients, so the first term is 4 N'.
        """
        attention = 12.0 * self.attention_width * self.spans(seq_len)
        return (4.0 if frozen else 6.0) * self.matrix_parameters + attention

    def spans(self, length: float) -> float:
        """Returns the sum over all layers of `windowed_span`."""
        full = (self.layers - len(self.windows)) * length
        return full + sum(windowed_span(length, window) for window in self.windows)

    def tokens_read(self, context: float) -> float:
        """Returns the number of tokens whose KV a step reads for one sequence, as the mean of all layers."""
        full = (self.layers - len(self.windows)) * context
        return (full + sum(min(context, window) for window in self.windows)) / self.layers

    def kv_bytes_per_token(self, bytes_each: float = 2.0) -> float:
        """Returns the bytes of one token in the KV cache. A token has 2 L k d elements of `bytes_each` bytes, for `L`
        layers with `k` KV heads of dimension `d`.
        """
        return 2 * self.layers * self.kv_width * bytes_each

    def weights(self, layers: range, *, first: bool = True, last: bool = True) -> Iterator[WeightTensor]:
        """Yields the weights of the given layers. With `first`, the weights before the first layer are included. With
        `last`, the weights after the last layer are included.
        """
        if first or (last and self.tied):
            yield WeightTensor("embedding", (self.vocab, self.width), 0)
        if first and self.positions:
            yield WeightTensor("positions", (self.positions, self.width))
        for index in layers:
            yield from self.layer_weights(sparse=index in self.sparse_layers)
        if last:
            yield from self._norm("norm", self.width)
            if not self.tied:
                yield WeightTensor("head", (self.vocab, self.width), 0)

    def layer_weights(self, *, sparse: bool = False) -> Iterator[WeightTensor]:
        yield from self._norm("input_norm", self.width)
        for name, rows in (("q_proj", self.attention_width), ("k_proj", self.kv_width), ("v_proj", self.kv_width)):
            yield from self._linear(name, rows, self.width, "rows", bias=self.qkv_bias)
        yield from self._linear("o_proj", self.width, self.attention_width, "columns", bias=self.out_bias)
        for name in ("q_norm", "k_norm") if self.head_norms else ():
            yield WeightTensor(name, (self.head_dim,))
        if self.post_norms:
            yield from self._norm("post_attention_norm", self.width)
            yield from self._norm("post_ffn_norm", self.width)
        yield from self._norm("ffn_norm", self.width)
        if sparse:
            yield WeightTensor("router", (self.experts, self.width), is_hidden=True)
            for name in ("gate_proj", "up_proj"):
                yield WeightTensor(name, (self.experts, self.expert_ffn, self.width), 1, is_hidden=True)
            yield WeightTensor("down_proj", (self.experts, self.width, self.expert_ffn), 2, is_hidden=True)
            return
        for name in ("gate_proj", "up_proj") if self.gated else ("up_proj",):
            yield from self._linear(name, self.ffn, self.width, "rows", bias=self.ffn_bias)
        yield from self._linear("down_proj", self.width, self.ffn, "columns", bias=self.ffn_bias)

    def layer_kinds(self, layers: range) -> list[tuple[bool, int]]:
        """Returns the pairs (True, number of layers with experts) and (False, number of layers without experts). Pairs
        whose number is 0 are left out.
        """
        sparse = sum(index in self.sparse_layers for index in layers)
        return [(kind, count) for kind, count in ((True, sparse), (False, len(layers) - sparse)) if count]

    def _linear(self, name: str, rows: int, columns: int, side: Side, *, bias: bool) -> Iterator[WeightTensor]:
        yield WeightTensor(name, (rows, columns), 0 if side == "rows" else 1, is_hidden=True)
        if bias:
            yield WeightTensor(name, (rows,), 0 if side == "rows" else None)

    def _norm(self, name: str, size: int) -> Iterator[WeightTensor]:
        yield WeightTensor(name, (size,))
        if self.layer_norms:
            yield WeightTensor(name, (size,))


def windowed_span(length: float, window: int | None) -> float:
    """Returns twice the mean number of tokens that a token of a sequence sees: the length without a window, else w (2 -
    w / length) for a window w.
    """
    return length if window is None or window >= length else window * (2.0 - window / length)


def _llama(name: str, layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int = 128_256) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        ffn=ffn,
        vocab=vocab,
    )


MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        _llama("llama-2-7b", 32, 4096, 32, 32, 11_008, 32_000),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14_336),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28_672),
        _llama("llama-3-405b", 126, 16_384, 128, 8, 53_248),
    )
}
"""The shapes of known models, from their own config files."""
