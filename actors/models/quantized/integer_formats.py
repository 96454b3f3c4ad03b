"""Reads the weight of one linear module that is stored in a format of compressed-tensors (int-quantized,
pack-quantized), GPTQ or AWQ.

Each function gets the number of the module's outputs (N) and inputs (K), and the block to read. It returns the
block. It also returns the number of groups in the whole module, which the caller checks against the config's scheme.
It may raise SplitsGroupError. The layouts are described in docs/models.md.
"""

from __future__ import annotations

from typing import Literal

import torch

from raytide.actors.models.quantized.cutting import Block, SplitsGroupError, words_of
from raytide.actors.models.quantized.module_tensors import ModuleTensors
from raytide.core.errors import ConfigError, DataError
from raytide.kernels.core import QuantizedWeight

Tensor = torch.Tensor

_INPUTS = ("input_scale", "input_zero_point")
"""Scales of static activations, which are not used: inputs are rounded by their own values."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The positions of the nibbles in an AWQ word, in the order of their columns."""
_ONES = {4: 0x11111111, 8: 0x01010101}
"""Words whose codes are all 1, by the bits of a code."""
_NO_GROUP = -1
"""The value in compressed-tensors' `weight_g_idx` if no order of columns was chosen."""


Read = tuple[QuantizedWeight, int]


def read_int8(tensors: ModuleTensors, rows: int, columns: int, block: Block) -> Read:
    """Reads the format int-quantized: `weight` int8 [N, K], `weight_scale` [N, G] or [1], optional
    `weight_zero_point`.
    """
    tensors.check_only(("weight", "weight_scale", "weight_zero_point", "weight_g_idx", "bias", *_INPUTS))
    codes_NK = tensors.integers("weight", rows, columns, dtype="I8", where=(block.rows, block.columns))
    scales_NG, groups = _scales(tensors, rows, columns, block)
    zeros_NG = None
    if "weight_zero_point" in tensors:
        shape = tensors.shape("weight_zero_point")
        zeros_NG = tensors.integers("weight_zero_point", *shape, dtype="I8").reshape(-1, groups).expand(rows, -1)
        zeros_NG = zeros_NG[block.rows, block.groups(columns, groups)]
    order_K = _order(tensors, "weight_g_idx", columns, groups, block)
    return _weight(8, codes_NK, scales_NG, zeros_NG, order_K), groups


def read_packed(tensors: ModuleTensors, rows: int, columns: int, block: Block) -> Read:
    """Reads the format pack-quantized: `weight_packed` int32 [N, K * b / 32]. Each code has b bits, and is stored with
    2^(b-1) added to it. The first code is in the lowest bits.
    """
    if tensors.dtype("weight_packed") == "U8":
        kind = "nvfp4" if "weight_global_scale" in tensors else "mxfp4"
        raise ConfigError(f"{tensors.where}: {kind} is not supported.", hint="Use the model's int4 or int8 version.")
    tensors.check_only(
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "bias", *_INPUTS)
    )
    words = (tensors.shape("weight_packed") or (0,))[-1]
    bits = _bits(tensors, "weight_packed", words, columns)
    if (shape := tuple(tensors.integers("weight_shape", 2, dtype="I64").tolist())) != (rows, columns):
        raise DataError(
            f"{tensors.where}: weight_shape is {shape}, config.json implies {(rows, columns)}.",
            hint="The directory mixes two models; export it again.",
        )
    own_words, own = words_of(block.inputs, bits)
    packed = tensors.integers("weight_packed", rows, words, where=(block.rows, own_words))
    codes_NK = signed(unpacked(packed, bits)[:, own], bits)
    scales_NG, groups = _scales(tensors, rows, columns, block)
    zeros_NG = None
    if "weight_zero_point" in tensors:
        own_words, own = words_of(block.outputs, bits)
        where = (own_words, block.groups(columns, groups))
        packed = tensors.integers("weight_zero_point", -(-rows * bits // 32), groups, where=where)
        zeros_NG = signed(unpacked(packed.t(), bits)[:, own].t(), bits)
    order_K = _order(tensors, "weight_g_idx", columns, groups, block)
    return _weight(bits, codes_NK, scales_NG, zeros_NG, order_K), groups


def read_gptq(
    tensors: ModuleTensors, rows: int, columns: int, block: Block, *, is_zero_less_one: bool, is_symmetric: bool
) -> Read:
    """Reads the format of GPTQ: `qweight` int32 [K * b / 32, N], `qzeros` int32 [G, N * b / 32], `scales` [G, N],
    optional `g_idx` [K]. Each code has b bits.

    GPTQ's first format subtracts a word of ones from each word of zero points, so a zero point of 0 borrows from the
    next one in its word. Some files of symmetric weights claim this format but store zero points unchanged.
    """
    tensors.check_only(("qweight", "qzeros", "scales", "g_idx", "bias"))
    words = (tensors.shape("qweight") or (0,))[0]
    bits = _bits(tensors, "qweight", words, columns)
    groups, scales_NG = _scales_by_group(tensors, rows, columns, block)
    own_words, own = words_of(block.inputs, bits)
    packed = tensors.integers("qweight", words, rows, where=(own_words, block.rows))
    codes_NK = unpacked(packed.t(), bits)[:, own]
    own_words, own = words_of(block.outputs, bits)
    where = (block.groups(columns, groups), own_words)
    packed, middle = tensors.integers("qzeros", groups, -(-rows * bits // 32), where=where), 1 << bits - 1
    zeros_GN = unpacked(packed, bits)[:, own]
    if is_zero_less_one and not (is_symmetric and bool((zeros_GN == middle).all())):
        zeros_GN = unpacked(packed + _ONES[bits], bits)[:, own]
    zeros_NG = zeros_GN.t().to(torch.int16) - middle
    order_K = _order(tensors, "g_idx", columns, groups, block)
    return _weight(bits, signed(codes_NK, bits), scales_NG, zeros_NG, order_K), groups


def read_awq(tensors: ModuleTensors, rows: int, columns: int, block: Block) -> Read:
    """Reads the format of AWQ (GEMM): `qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8], `scales` [G, N]. The order
    of the nibbles in a word is AWQ's own.
    """
    tensors.check_only(("qweight", "qzeros", "scales", "bias"))
    if rows % 8:
        raise DataError(f"{tensors.where}: AWQ cannot store {rows} outputs.", hint="They are a multiple of 8.")
    own_words, own = words_of(block.outputs, 4)
    codes_KN = _in_columns(tensors.integers("qweight", columns, rows // 8, where=(block.columns, own_words)))[:, own]
    groups, scales_NG = _scales_by_group(tensors, rows, columns, block)
    where = (block.groups(columns, groups), own_words)
    zeros_GN = _in_columns(tensors.integers("qzeros", groups, rows // 8, where=where))[:, own].to(torch.int16)
    return _weight(4, signed(codes_KN.t().contiguous(), 4), scales_NG, zeros_GN.t() - 8, None), groups


def _in_columns(words: Tensor) -> Tensor:
    codes: Tensor = unpacked(words, 4).unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)]
    return codes.flatten(-2)


def _weight(
    bits: Literal[4, 8],
    codes_NK: Tensor,
    scales_NG: Tensor,
    zeros_NG: Tensor | None,
    order_K: Tensor | None,
) -> QuantizedWeight:
    """Returns the weight (codes - zeros) * scales in the form codes * scales + offsets; without offsets if all zeros
    are 0.
    """
    offsets_NG = None
    if zeros_NG is not None and bool(zeros_NG.any()):
        offsets_NG = (-zeros_NG.float() * scales_NG).contiguous()
    if order_K is not None:
        codes_NK = codes_NK[:, order_K]
    return QuantizedWeight(bits, codes_NK.contiguous(), scales_NG.contiguous(), offsets_NG, order_K)


def _bits(tensors: ModuleTensors, suffix: str, words: int, columns: int) -> Literal[4, 8]:
    """Returns the bits of a code, given the number of int32 words that hold the codes of `columns` inputs."""
    if words == -(-columns * 4 // 32):
        return 4
    if words == -(-columns * 8 // 32):
        return 8
    raise DataError(
        f"{tensors.where}: {suffix} holds {words} words for {columns} inputs, which are neither 4 nor 8 bits each.",
        hint="Supported: 4 and 8 bits.",
    )


def _scales(tensors: ModuleTensors, rows: int, columns: int, block: Block) -> tuple[Tensor, int]:
    """Returns compressed-tensors' scales [N, G], and the number of groups. A file may have a single scale for the whole
    tensor.
    """
    if "weight_scale" not in tensors:
        raise DataError(f"{tensors.where} has no weight_scale.", hint="Export or download the model again.")
    shape = tensors.shape("weight_scale")
    if shape in ((), (1,)):
        return tensors.scales("weight_scale", *shape).reshape(1, 1).expand(block.num_rows, 1), 1
    groups = shape[-1] if len(shape) == 2 else 1
    checked_group(columns, groups, tensors.where)
    if shape == (rows,):
        return tensors.scales("weight_scale", rows, where=(block.rows,)).reshape(-1, 1), 1
    where = (block.rows, block.groups(columns, groups))
    return tensors.scales("weight_scale", rows, groups, where=where), groups


def _scales_by_group(tensors: ModuleTensors, rows: int, columns: int, block: Block) -> tuple[int, Tensor]:
    """Returns the number of groups, and the scales [N, G] of a file that stores [G, N]."""
    groups = (tensors.shape("scales") or (0,))[0] if "scales" in tensors else 0
    checked_group(columns, groups, tensors.where)
    where = (block.groups(columns, groups), block.rows)
    return groups, tensors.scales("scales", groups, rows, where=where).t()


def _order(tensors: ModuleTensors, suffix: str, columns: int, groups: int, block: Block) -> Tensor | None:
    if suffix not in tensors:
        return None
    groups_K = tensors.integers(suffix, columns)
    if suffix == "weight_g_idx" and bool((groups_K == _NO_GROUP).all()):
        return None
    order_K = column_order(groups_K, columns // groups, tensors.name(suffix))
    if order_K is not None and block.inputs != (0, columns):
        raise SplitsGroupError
    return order_K


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpacks the unsigned codes that int32 words hold, and returns the codes as uint8. The last dimension becomes 32 /
    bits times as long.

    The lowest bits of a word hold its first code.
    """
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Returns unsigned codes minus 2^(bits - 1), as int8."""
    return (codes.to(torch.int16) - (1 << bits - 1)).to(torch.int8)


def checked_group(columns: int, groups: int, name: str) -> int:
    """Returns the group size of a module that has `columns` inputs and `groups` scales for each output. Raises
    DataError if `groups` does not divide `columns`.
    """
    if groups < 1 or columns % groups:
        raise DataError(
            f"{name}: {columns} inputs cannot be divided into {groups} groups.",
            hint="Quantize with a group size that divides the inputs.",
        )
    return columns // groups


def column_order(groups_K: Tensor, group_size: int, name: str) -> Tensor | None:
    """Returns the permutation that sorts the columns by group, or None if they are already in that order. `groups_K`
    has the group of each column (`g_idx` in the file).
    """
    columns = groups_K.numel()
    in_order = torch.arange(columns, device=groups_K.device) // group_size
    groups_K = groups_K.long()
    if torch.equal(groups_K, in_order):
        return None
    order_K = groups_K.argsort(stable=True)
    if not torch.equal(groups_K[order_K], in_order):
        raise DataError(
            f"{name} does not put {group_size} inputs into each group.", hint="The file is damaged; download it again."
        )
    return order_K
