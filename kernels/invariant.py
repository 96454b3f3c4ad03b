"""Operators in plain torch whose result for a row never depends on the other rows of the batch.

torch's matrix products and sums choose their order of additions by the number of rows, so these operators compute one
row at a time. They are slow. Deterministic engines use them on devices without faster invariant operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from raytide.kernels import ref
from raytide.kernels.core import Activation, AttentionSpec, LinearInput, NormWeights, PagedBatch, QuantizedWeight
from raytide.kernels.registry import register

Tensor = torch.Tensor

_PRIORITY = -10  # below the references, which are not invariant


@register("norm", "any", priority=_PRIORITY, invariant=True)
def norm(x_TN: Tensor, by: NormWeights) -> Tensor:
    return torch.cat([ref.norm(row, by) for row in x_TN.split(1)])


@register("add_norm", "any", priority=_PRIORITY, invariant=True)
def add_norm(x_TN: Tensor, delta_TN: Tensor, by: NormWeights) -> Tensor:
    return norm(x_TN.add_(delta_TN), by)


@register("linear", "any", priority=_PRIORITY, invariant=True)
def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([F.linear(row, weight, bias) for row in x.split(1)])


@register("quantized_linear", "any", priority=_PRIORITY, invariant=True)
def quantized_linear(weight: QuantizedWeight, bias: Tensor | None, input_as: LinearInput) -> Callable[[Tensor], Tensor]:
    """Returns a linear layer. With `input_as` "int8" it computes the exact result that the kernels of all processors
    must equal.

    In that case, each group of inputs is computed in parts of 32 inputs. The sum over a part is an exact sum of
    integers. Fused multiply-adds in float32 then add these sums up. `total` starts at zero in each group:

    - within a group: total += sum of the part * scale of the part's inputs
    - over the groups: y += total * scale of the group
    - with offsets, after each group: y += sum of the group's rounded inputs * offset of the group

    The bias is added last.
    """
    if input_as == "float":
        apply_wide = linear(weight.dequantized(), None if bias is None else bias.float())
        return lambda x_TK: apply_wide(x_TK.float()).to(x_TK.dtype)
    size, scales_NG, offsets_NG = weight.group_size, weight.scales_NG, weight.offsets_NG
    codes_NGg = weight.codes_NK.float().unflatten(1, (-1, size))
    codes_NGP = F.pad(codes_NGg, (0, -size % ref.INPUT_GROUP)).unflatten(2, (-1, ref.INPUT_GROUP))
    # below 2^24, float32 sums of integers are exact in any order

    def apply(x_TK: Tensor) -> Tensor:
        inputs_TGP, input_scales = ref.input_codes(x_TK, weight.columns_K, size)
        y_TN = x_TK.new_zeros((len(x_TK), len(codes_NGP)), dtype=torch.float32)
        for group in range(scales_NG.shape[1]):
            total, inputs = torch.zeros_like(y_TN), y_TN.new_zeros(len(x_TK), 1)
            for part in range(codes_NGP.shape[2]):
                codes, by = inputs_TGP[:, group, part], input_scales[:, group, part]
                total = _fused(codes @ codes_NGP[:, group, part].t(), by, total)
                inputs = _fused(codes.sum(1, keepdim=True), by, inputs)
            y_TN = _fused(total, scales_NG[:, group], y_TN)
            if offsets_NG is not None:
                y_TN = _fused(inputs, offsets_NG[:, group], y_TN)
        return (y_TN if bias is None else y_TN + bias.float()).to(x_TK.dtype)

    return apply


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns a * b + c with a single rounding to float32. The float64 sum is rounded to odd, so that rounding it again
    to float32 adds no error (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    taken = total - product
    error = (product - (total - taken)) + (addend - taken)
    bits = total.view(torch.int64)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where((error != 0) & (bits & 1 == 0), bits + towards, bits).view(torch.float64).float()


@register("experts", "any", priority=_PRIORITY, invariant=True)
def experts(gate_up_E2FN: Tensor, down_ENF: Tensor, kind: Activation) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    together = ref.experts(gate_up_E2FN, down_ENF, kind)

    def apply(x_TN: Tensor, chosen_TX: Tensor, weights_TX: Tensor) -> Tensor:
        rows = zip(x_TN.split(1), chosen_TX.split(1), weights_TX.split(1), strict=True)
        return torch.cat([together(*row) for row in rows])

    return apply


@register("attention", "any", priority=_PRIORITY, invariant=True)
def attention(batch: PagedBatch, spec: AttentionSpec) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns an attention function that computes each token as if it were a sequence of its own. Its results do not
    depend on the batch.
    """
    lens = list(zip(batch.query_lens, batch.context_lens, strict=True))
    contexts = [end for query, context in lens for end in range(context - query + 1, context + 1)]
    repeats = torch.tensor(batch.query_lens, device=batch.block_tables_BM.device)
    tables = batch.block_tables_BM.repeat_interleave(repeats, 0)
    alone = replace(batch, query_lens=[1] * len(contexts), context_lens=contexts, block_tables_BM=tables)
    return ref.attention(alone, spec)
