"""Codes packed in int32 words, and the checks that all formats share."""

from __future__ import annotations

import torch

from raytide.core.errors import DataError

Tensor = torch.Tensor


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the codes 0 to 2^bits - 1 of int32 words as uint8: the last dimension holds 32 / bits times as many.

    The lowest bits of a word are its first code.
    """
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Returns unsigned codes minus 2^(bits - 1), as int8."""
    return (codes.to(torch.int16) - (1 << bits - 1)).to(torch.int8)


def checked_group(columns: int, groups: int, name: str) -> int:
    """Returns the group size of a module with `groups` scales for each output."""
    if groups < 1 or columns % groups:
        raise DataError(
            f"{name}: {columns} inputs cannot be divided into {groups} groups.",
            hint="Quantize with a group size that divides the inputs.",
        )
    return columns // groups


def column_order(groups_K: Tensor, group_size: int, name: str) -> Tensor | None:
    """Returns the columns in the order of their groups for `g_idx` [K]; None if they are in order already."""
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
