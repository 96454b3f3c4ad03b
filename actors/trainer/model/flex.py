"""Windows and soft-caps by FlexAttention, which compiles them into one kernel on a GPU. It has no backward on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from raytide.kernels.core import AttentionSpec

__all__ = ["flex"]


def flex(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, spec: AttentionSpec) -> Tensor:
    """out_BHTC. The queries are the last T of the keys' S positions."""
    run = _compiled() if q_BHTC.is_cuda else cast("Callable[..., Any]", flex_attention)
    out: Tensor = run(
        q_BHTC,
        k_BKTC,
        v_BKTC,
        score_mod=None if spec.softcap is None else _capped(spec.softcap),
        block_mask=_seen(q_BHTC.shape[2], k_BKTC.shape[2], spec.window, q_BHTC.device),
        scale=spec.scale,
        enable_gqa=k_BKTC.shape[1] != q_BHTC.shape[1],
    )
    return out


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _seen(length: int, context: int, window: int | None, device: torch.device) -> BlockMask:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = query + (context - length)
        return key <= at if window is None else (key <= at) & (key > at - window)

    return create_block_mask(sees, None, None, length, context, device=device)
