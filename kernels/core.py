"""The types that operators share.

Suffixes of tensor names give the shapes, here and in the operators:

- T tokens of the step, B sequences, L context length, M blocks per sequence, S slots of the cache (blocks x block size)
- N hidden size, F feed-forward width, E experts, X experts per token
- H query heads, K KV heads, D head dim, A = H + 2K heads of a stacked qkv
- in the weight of a linear layer: N outputs, K inputs, G groups of inputs, g inputs of a group
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from raytide.core.errors import ConfigError

Tensor = torch.Tensor

Activation = Literal["silu", "gelu", "gelu_tanh"]
Linear = Callable[[Tensor], Tensor]
"""A linear layer, bound to its weight."""
LinearInput = Literal["float", "int8"]
"""The numbers that a quantised linear multiplies: its input as it is, or rounded to int8 in groups of 32 of a row."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The weights of an RMSNorm (`kind` "rms") or LayerNorm ("layer"). Gemma multiplies by 1 + weight, so the loader
    adds 1 to Gemma's weights.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    kind: Literal["rms", "layer"] = "rms"


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights of the RMSNorms over the D numbers of each query head and each key head (Qwen3, Gemma 3). They act
    before the rotation.
    """

    q_D: Tensor
    k_D: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class SideBySide:
    """One layer made of several linear layers that read the same input. Their outputs are concatenated."""

    linears: Sequence[Linear]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears], -1)


@dataclass(frozen=True, slots=True)
class SparseFfn:
    """A sparse feed-forward layer. `router` computes the logits [T, E] of the experts. `experts` computes the weighted
    sum of the chosen experts' outputs (operator `experts`).
    """

    router: Linear
    experts: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer. The feed-forward part is either `sparse`, or `gate_up` and `down`. In GPT-2,
    `gate_up` has no gate.
    """

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


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotations of heads at the positions of the step's tokens.

    A head has D numbers, of which the first R rotate. R equals D unless the rotation is partial. Among the first R
    numbers, number i rotates with number i + R/2. The rotation is `x * cos + swapped(x) * sin`, where the first half
    of `sin_TR` is negated.
    """

    cos_TR: Tensor
    sin_TR: Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The fixed parameters of an attention operator.

    `window` is the number of positions that a token sees, including its own. If `softcap` is a number c, each score
    becomes `c * tanh(score / c)`.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(slots=True)
class PagedBatch:
    """The sequences of one step, and the cache positions of their keys and values. These positions are the same for all
    layers.

    The tokens of the step are in the order of the sequences. Sequence b has `query_lens[b]` of these tokens. They
    are the last tokens of the sequence's context, which has `context_lens[b]` tokens.

    The context's KV is in the blocks of row b of `block_tables_BM`. The row is padded with any valid block. The KV
    of token t itself is written to slot `slots_T[t]`.
    """

    query_lens: list[int]
    context_lens: list[int]
    block_tables_BM: Tensor
    slots_T: Tensor
    block_size: int


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A linear layer's weight in groups of g = K / G inputs.

    - w[n, k] = codes[n, k] * scales[n, k // g] + offsets[n, k // g]

    All file formats are read into this class. Each device then packs the weight in a form of its own. In this class,
    each signed code takes a byte. Codes of 8 bits are -128 to 127, and codes of 4 bits are -8 to 7. Scales and
    offsets are float32, because products of a file's bfloat16 numbers must not be rounded to bfloat16. A symmetric
    weight has no offsets. If the file groups the inputs in another order (GPTQ's `g_idx`), column k of the codes
    belongs to input columns_K[k].
    """

    bits: Literal[4, 8]
    codes_NK: Tensor
    scales_NG: Tensor
    offsets_NG: Tensor | None = None
    columns_K: Tensor | None = None

    @property
    def group_size(self) -> int:
        return int(self.codes_NK.shape[1] // self.scales_NG.shape[1])

    def dequantized(self) -> Tensor:
        """Returns the weight [N, K] in float32, with columns in the model's order. Tests compare all kernels with this
        result.
        """
        scales, offsets = self.scales_NG, self.offsets_NG
        weight_NGg = self.codes_NK.float().unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]
        if offsets is not None:
            weight_NGg += offsets[:, :, None]
        weight_NK: Tensor = weight_NGg.flatten(1)
        if self.columns_K is None:
            return weight_NK
        ordered_NK = torch.empty_like(weight_NK)
        ordered_NK[:, self.columns_K] = weight_NK
        return ordered_NK


def round_to_nearest(
    weight_NK: Tensor, bits: Literal[4, 8], group_size: int | None = None, symmetric: bool = True
) -> QuantizedWeight:
    """Returns the weight rounded to 8 or 4 bits. The engine uses this function when it loads a model whose output head
    it quantises.

    In each output, every group of `group_size` inputs has a scale. If `group_size` is None, all inputs are one
    group.

    - symmetric scale: largest magnitude / 127.5 (4 bits: / 7.5), as in compressed-tensors
    - asymmetric scale: (largest number - least number) / 255 (4 bits: / 15), with an offset; 0 counts as a
      number of every group

    Raises ConfigError if the groups do not divide the inputs, or if a weight is not finite.
    """
    width, size = weight_NK.shape[1], group_size or weight_NK.shape[1]
    if size < 1 or width % size:
        raise ConfigError(
            f"A weight of {width} inputs has no groups of {size}.", hint="Choose a group size that divides the inputs."
        )
    groups_NGg = weight_NK.float().unflatten(1, (-1, size))
    if not groups_NGg.isfinite().all():
        raise ConfigError("A weight to be quantised has numbers that are not finite.", hint="Check the checkpoint.")
    lowest, steps = -(2 ** (bits - 1)), 2**bits - 1
    if symmetric:
        scales_NG1, offsets_NG1 = groups_NGg.abs().amax(-1, keepdim=True) / (steps / 2), None
        shifted = groups_NGg
    else:
        least = groups_NGg.amin(-1, keepdim=True).clamp(max=0)
        scales_NG1 = (groups_NGg.amax(-1, keepdim=True).clamp(min=0) - least) / steps
        zeros = torch.where(scales_NG1 > 0, lowest - least / scales_NG1, 0.0).round()  # the code of 0
        offsets_NG1 = -zeros * scales_NG1
        shifted = groups_NGg - offsets_NG1
    codes = torch.where(scales_NG1 > 0, shifted / scales_NG1, 0.0).round().clamp(lowest, -lowest - 1)
    offsets_NG = None if offsets_NG1 is None else offsets_NG1[..., 0].contiguous()
    return QuantizedWeight(bits, codes.to(torch.int8).flatten(1), scales_NG1[..., 0].contiguous(), offsets_NG)
