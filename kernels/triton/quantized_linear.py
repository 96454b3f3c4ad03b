"""Linear layers with 8-bit and 4-bit weights, which are widened in registers.

Codes are exact in every float type. A piece is a set of inputs that share a scale. The sum of products over a piece is
scaled in float32, so a weight is never rounded. Int8 inputs, in groups of 32, are multiplied as integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from raytide.kernels import ref
from raytide.kernels.core import LinearInput, QuantizedWeight
from raytide.kernels.triton.dot import INTERPRETED, dot
from raytide.kernels.triton.packing import PackedWeight, pack
from raytide.kernels.triton.support import DTYPES, gpu_variant, num_processors

Tensor = torch.Tensor

_FEWEST_ROWS = 16  # of a matrix instruction
_MOST_SPLITS = 8
_PANELS_OF_A_SPLIT = 4
_PROGRAMS_PER_PROCESSOR = 2
_VECTOR_OUTPUTS = 16


@triton.jit
def _unpacked(codes, BITS: tl.constexpr, HIGH: tl.constexpr):
    if BITS == 4:
        if HIGH:
            codes = codes >> 4  # keeps the sign
        else:
            codes = ((codes & 15) ^ 8) - 8
    return codes.to(tl.int8)


@triton.jit
def _inputs_of(piece, columns, num_inputs, HAS_COLUMNS: tl.constexpr, BYTES: tl.constexpr):
    at = piece * BYTES + tl.arange(0, BYTES)
    if HAS_COLUMNS:
        at = tl.load(columns + at)
        inside = at >= 0
    else:
        inside = at < num_inputs
    return at, inside


@triton.jit
def _add_piece(
    sums,
    codes,
    piece,
    x_row,
    is_row,
    input_scale_row,
    output,
    is_output,
    columns,
    scales,
    offsets,
    num_inputs,
    num_outputs,
    groups,
    pieces_per_group,
    HAS_COLUMNS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    IS_INT8: tl.constexpr,
    BYTES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Returns `sums` [rows, outputs] plus the products with one piece [BYTES, outputs] of the weight."""
    at, inside = _inputs_of(piece, columns, num_inputs, HAS_COLUMNS, BYTES)
    x = tl.load(x_row[:, None] + at[None, :], mask=is_row[:, None] & inside[None, :], other=0)
    group = tl.minimum(piece // pieces_per_group, groups - 1)
    scale = tl.load(scales + group * num_outputs + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if IS_INT8:
        input_scale = tl.load(input_scale_row + piece, mask=is_row, other=0.0)[:, None]
        sums += tl.dot(x, codes, out_dtype=tl.int32).to(tl.float32) * (input_scale * scale)
    else:
        sums += dot(x, codes, UPCAST) * scale
    if HAS_OFFSETS:
        offset = tl.load(offsets + group * num_outputs + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if IS_INT8:
            sums += tl.sum(x.to(tl.int32), 1).to(tl.float32)[:, None] * (input_scale * offset)
        else:
            sums += tl.sum(x.to(tl.float32), 1)[:, None] * offset
    return sums


@triton.jit(do_not_specialize=["rows", "groups", "pieces_per_group", "panels_per_split"])
def product_kernel(
    x,
    input_scales,
    codes,
    scales,
    offsets,
    columns,
    bias,
    out,
    rows,
    x_stride,
    num_inputs,
    num_outputs,
    groups,
    pieces_per_group,
    panels,
    panels_per_split,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes products. The grid is (blocks of rows, blocks of outputs, splits of the inputs). Neighbouring programs
    read the same weights.

    With several splits, `out` is [splits, rows, N] in float32 and does not include the bias.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < rows, output < num_outputs
    x_row = x + row.to(tl.int64) * x_stride
    input_scale_row = input_scales + row * (x_stride // BYTES) if IS_INT8 else input_scales
    byte = tl.arange(0, BYTES)
    first = tl.program_id(2) * panels_per_split
    code_at = codes + first.to(tl.int64) * num_outputs * BYTES + output[None, :] * BYTES + byte[:, None]
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for panel in range(first, tl.minimum(first + panels_per_split, panels)):
        packed = tl.load(code_at, mask=is_output[None, :], other=0)
        code_at += num_outputs * BYTES
        for half in tl.static_range(8 // BITS):
            sums = _add_piece(
                sums,
                _unpacked(packed, BITS, half == 1),
                panel * (8 // BITS) + half,
                x_row,
                is_row,
                input_scale_row,
                output,
                is_output,
                columns,
                scales,
                offsets,
                num_inputs,
                num_outputs,
                groups,
                pieces_per_group,
                HAS_COLUMNS,
                HAS_OFFSETS,
                IS_INT8,
                BYTES,
                UPCAST,
            )
    if HAS_BIAS and not IS_SPLIT:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    out_row = (row if not IS_SPLIT else tl.program_id(2) * rows + row).to(tl.int64) * num_outputs
    tl.store(
        out + out_row[:, None] + output[None, :],
        sums.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


@triton.jit(do_not_specialize=["groups", "pieces_per_group"])
def vector_kernel(
    x,
    codes,
    scales,
    offsets,
    columns,
    bias,
    out,
    num_inputs,
    num_outputs,
    groups,
    pieces_per_group,
    panels,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Computes the product with one row. Each thread accumulates sums over its own inputs. The sums of all threads are
    added once, at the end.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < num_outputs
    byte = tl.arange(0, BYTES)
    code_at = codes + output[:, None] * BYTES + byte[None, :]
    sums = tl.zeros([OUTPUTS, BYTES], tl.float32)
    for panel in range(panels):
        packed = tl.load(code_at, mask=is_output[:, None], other=0)
        code_at += num_outputs * BYTES
        for half in tl.static_range(8 // BITS):
            piece = panel * (8 // BITS) + half
            at, inside = _inputs_of(piece, columns, num_inputs, HAS_COLUMNS, BYTES)
            values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            group = tl.minimum(piece // pieces_per_group, groups - 1)
            scale = tl.load(scales + group * num_outputs + output, mask=is_output, other=0.0).to(tl.float32)
            weights = _unpacked(packed, BITS, half == 1).to(tl.float32) * scale[:, None]
            if HAS_OFFSETS:
                offset = tl.load(offsets + group * num_outputs + output, mask=is_output, other=0.0)
                weights += offset.to(tl.float32)[:, None]
            sums += weights * values
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["x_stride"])
def round_kernel(
    x,
    codes,
    input_scales,
    columns,
    x_stride,
    num_inputs,
    parts,
    HAS_COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Rounds inputs to int8 codes. Writes codes and scales like those of `ref.input_codes`. The grid is (rows, parts of
    32 inputs).
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, inside = _inputs_of(part, columns, num_inputs, HAS_COLUMNS, PART)
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values))
    is_finite = tl.sum(tl.where(tl.abs(values) < float("inf"), 0, 1)) == 0
    has_codes = is_finite & (largest >= SMALLEST)
    inverse = tl.div_rn(127.0, tl.where(has_codes, largest, 1.0))
    code = tl.fma(values, inverse, 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum keeps no fraction, ties go to even
    code = tl.where(has_codes, code, 0.0)
    tl.store(codes + (row * parts + part) * PART + tl.arange(0, PART), code.to(tl.int8))
    tl.store(input_scales + row * parts + part, tl.where(is_finite, tl.div_rn(largest, 127.0), float("nan")))


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The tile of one program: its numbers of rows and outputs, and its numbers of warps and pipeline stages."""

    rows: int
    outputs: int
    warps: int
    stages: int


def product_tile(rows: int) -> ProductTile:
    """Returns a tile that covers all rows if they are few. Otherwise it has as many rows as fit into registers."""
    block = min(max(triton.next_power_of_2(rows), _FEWEST_ROWS), 64)
    outputs, warps = (64, 4) if block < 64 else (128, 8)
    return ProductTile(block, outputs, warps, 2 if torch.version.hip else 3)


@gpu_variant("quantized_linear")
def quantized_linear(weight: QuantizedWeight, bias: Tensor | None, input_as: LinearInput) -> Callable[[Tensor], Tensor]:
    """Returns a linear layer that packs its quantised weight once and does not keep the unpacked weight."""
    packed = pack(weight, for_int8=input_as == "int8")

    def apply(x: Tensor) -> Tensor:
        x_TK = x.reshape(-1, packed.num_inputs)
        if x_TK.stride(1) != 1:
            x_TK = x_TK.contiguous()
        if x_TK.dtype not in DTYPES:
            raise TypeError(f"quantized_linear: inputs are {x_TK.dtype}, not one of {DTYPES}")
        with torch.cuda.device_of(x):  # kernels run on torch's present device, which may be another
            if input_as == "int8":
                out_TN = _product(*_rounded(x_TK, packed), packed, bias, x.dtype)
            elif x_TK.shape[0] == 1:
                out_TN = _vector(x_TK, packed, bias)
            else:
                out_TN = _product(x_TK, None, packed, bias, x.dtype)
        return out_TN.view(*x.shape[:-1], packed.num_outputs)

    return apply


def _rounded(x_TK: Tensor, packed: PackedWeight) -> tuple[Tensor, Tensor]:
    """Returns x as int8 codes in the panels' order, with zeros for padding, and the scale of each part."""
    rows, parts = x_TK.shape[0], packed.pieces
    codes = x_TK.new_empty((rows, parts * ref.INPUT_GROUP), dtype=torch.int8)
    scales = x_TK.new_empty((rows, parts), dtype=torch.float32)
    if rows:
        round_kernel[(rows, parts)](
            x_TK,
            codes,
            scales,
            packed.columns if packed.columns is not None else codes,
            x_TK.stride(0),
            packed.num_inputs,
            parts,
            HAS_COLUMNS=packed.columns is not None,
            PART=ref.INPUT_GROUP,
            SMALLEST=ref.SMALLEST_CODED,
            num_warps=1,
        )
    return codes, scales


def _vector(x_TK: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    panels, num_outputs, num_bytes = packed.codes_PNB.shape
    out_TN = x_TK.new_empty(1, num_outputs)
    vector_kernel[(triton.cdiv(num_outputs, _VECTOR_OUTPUTS),)](
        x_TK,
        packed.codes_PNB,
        packed.scales_GN,
        packed.offsets_GN if packed.offsets_GN is not None else packed.scales_GN,
        packed.columns if packed.columns is not None else packed.codes_PNB,
        bias if bias is not None else out_TN,
        out_TN,
        packed.num_inputs,
        num_outputs,
        packed.scales_GN.shape[0],
        packed.pieces_per_group,
        panels,
        BITS=packed.bits,
        BYTES=num_bytes,
        HAS_OFFSETS=packed.offsets_GN is not None,
        HAS_COLUMNS=packed.columns is not None,
        HAS_BIAS=bias is not None,
        OUTPUTS=_VECTOR_OUTPUTS,
        num_warps=4,
    )
    return out_TN


def _product(
    x: Tensor, input_scales: Tensor | None, packed: PackedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    rows = x.shape[0]
    panels, num_outputs, num_bytes = packed.codes_PNB.shape
    out_TN = x.new_empty((rows, num_outputs), dtype=dtype)
    if not rows:
        return out_TN
    tile = product_tile(rows)
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(num_outputs, tile.outputs)
    splits = num_splits(grid[0] * grid[1], panels, x.device)
    target = out_TN if splits == 1 else x.new_empty((splits, rows, num_outputs), dtype=torch.float32)
    # Int8 codes are in the panels' order already, with a zero for each missing input.
    columns = None if input_scales is not None else packed.columns
    product_kernel[(*grid, splits)](
        x,
        input_scales if input_scales is not None else packed.scales_GN,
        packed.codes_PNB,
        packed.scales_GN,
        packed.offsets_GN if packed.offsets_GN is not None else packed.scales_GN,
        columns if columns is not None else packed.codes_PNB,
        bias if bias is not None else out_TN,
        target,
        rows,
        x.stride(0),
        packed.num_inputs if input_scales is None else x.shape[1],
        num_outputs,
        packed.scales_GN.shape[0],
        packed.pieces_per_group,
        panels,
        triton.cdiv(panels, splits),
        BITS=packed.bits,
        BYTES=num_bytes,
        HAS_OFFSETS=packed.offsets_GN is not None,
        HAS_COLUMNS=columns is not None,
        HAS_BIAS=bias is not None,
        IS_INT8=input_scales is not None,
        IS_SPLIT=splits > 1,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        UPCAST=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        sums_TN = target.sum(0)
        out_TN.copy_(sums_TN if bias is None else sums_TN.add_(bias))
    return out_TN


def num_splits(programs: int, panels: int, device: torch.device) -> int:
    """Returns the number of splits of the inputs, a power of two. The splits keep all processors busy even if the input
    has few rows.
    """
    wanted = min(_PROGRAMS_PER_PROCESSOR * num_processors(device) // programs, panels // _PANELS_OF_A_SPLIT)
    return 1 << max(min(wanted, _MOST_SPLITS), 1).bit_length() - 1
