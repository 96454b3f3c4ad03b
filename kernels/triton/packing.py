"""Quantised weights in the format that the kernels read, packed once from `QuantizedWeight`. The module does not need
Triton.

Shape suffixes in addition to those of `core.py`: P panels, B bytes of a panel for one output (16, 32 or 64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from raytide.kernels.core import QuantizedWeight
from raytide.kernels.ref import INPUT_GROUP

Tensor = torch.Tensor

_PANEL_BYTES = (64, 32, 16)
_FEWEST = 16  # inputs of a matrix instruction


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K], stored as panels of codes. A panel covers B inputs (8 bits) or 2 B inputs (4 bits). For each
    output, the panel has B adjacent bytes.

    The kernels can thus read a tile of outputs as one range of memory. In a byte with two 4-bit codes, the low half
    belongs to input j of the panel, and the high half to input B + j. A piece consists of B inputs of one group,
    which share the group's scale and offset. Piece p belongs to group `p // pieces_per_group`. Input k of the panels
    is x[:, columns[k]], or padding if columns[k] is -1. If `columns` is None, input k of the panels is x[:, k], or
    zero if k is at least K.
    """

    bits: Literal[4, 8]
    num_outputs: int
    num_inputs: int
    codes_PNB: Tensor
    scales_GN: Tensor
    offsets_GN: Tensor | None
    columns: Tensor | None
    pieces_per_group: int

    @property
    def pieces(self) -> int:
        return int(self.codes_PNB.shape[0]) * (2 if self.bits == 4 else 1)


def pack(weight: QuantizedWeight, for_int8: bool = False) -> PackedWeight:
    """Packs a weight on its own device. If the kernels do not support the size of the weight's groups, the groups are
    padded.

    With `for_int8`, a piece (see `PackedWeight`) has 32 inputs, because int8 inputs share a scale in groups of 32.
    """
    codes_NK, scales_NG, offsets_NG = weight.codes_NK, weight.scales_NG, weight.offsets_NG
    num_outputs, num_inputs = codes_NK.shape
    groups, columns = scales_NG.shape[1], weight.columns_K
    group_size, fewest = num_inputs // groups, INPUT_GROUP if for_int8 else _FEWEST
    if groups > 1 and group_size % fewest:
        padding = -group_size % fewest
        codes_NK = F.pad(codes_NK.unflatten(1, (groups, group_size)), (0, padding)).flatten(1)
        order = torch.arange(num_inputs, device=codes_NK.device) if columns is None else columns
        columns = F.pad(order.unflatten(0, (groups, group_size)), (0, padding), value=-1).flatten()
        group_size += padding
    fitting = (size for size in _PANEL_BYTES if group_size % size == 0 or groups == 1)
    piece = INPUT_GROUP if for_int8 else next(fitting)
    inputs = piece * (2 if weight.bits == 4 else 1)
    missing = -codes_NK.shape[1] % inputs
    panels_NPI = F.pad(codes_NK, (0, missing)).unflatten(1, (-1, inputs))
    if columns is not None:
        columns = F.pad(columns, (0, missing), value=-1).to(torch.int32)
    if weight.bits == 4:
        low, high = panels_NPI.chunk(2, -1)
        panels_NPI = (low & 15) | (high << 4)
    return PackedWeight(
        bits=weight.bits,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        codes_PNB=panels_NPI.transpose(0, 1).contiguous(),
        scales_GN=_narrowest(scales_NG.t().contiguous()),
        offsets_GN=None if offsets_NG is None else _narrowest(offsets_NG.t().contiguous()),
        columns=columns,
        pieces_per_group=group_size // piece if groups > 1 else panels_NPI.shape[1] * 2,
    )


def _narrowest(values: Tensor) -> Tensor:
    """Returns the values in 16 bits if that is exact, which is usual because files mostly store them so; else
    unchanged.
    """
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if torch.equal(narrow.float(), values):
            return narrow
    return values
