"""Causal attention for training. It supports the family's sliding window and soft-cap. If a row holds several
documents, attention stays inside each document.

Plain causal attention uses SDPA, which picks its flash kernel. With a window, a soft-cap or documents, a GPU uses
FlexAttention, which is compiled into one kernel. FlexAttention has no backward pass on a CPU. A CPU therefore uses SDPA
with a mask or, with a soft-cap, plain matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from raytide.kernels.core import AttentionSpec


def attend(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, spec: AttentionSpec, documents_BS: Tensor | None = None
) -> Tensor:
    """Returns the attention output out_BHTC. The keys are at S positions, and the queries are at the last T of these
    positions. `documents_BS` has the document number of each key.
    """
    same = q_BHTC.shape[2] == k_BKTC.shape[2]
    masked = documents_BS is not None or (spec.window is not None and spec.window < k_BKTC.shape[2])
    if q_BHTC.is_cuda and (masked or spec.softcap is not None):
        return flex(q_BHTC, k_BKTC, v_BKTC, spec, documents_BS)
    if spec.softcap is not None:
        return _capped(q_BHTC, k_BKTC, v_BKTC, spec, documents_BS)
    return F.scaled_dot_product_attention(
        q_BHTC,
        k_BKTC,
        v_BKTC,
        attn_mask=None if same and not masked else causal_mask(q_BHTC, k_BKTC, spec.window, documents_BS),
        is_causal=same and not masked,
        scale=spec.scale,
        enable_gqa=k_BKTC.shape[1] != q_BHTC.shape[1],
    )


def causal_mask(q_BHTC: Tensor, k_BKTC: Tensor, window: int | None, documents_BS: Tensor | None = None) -> Tensor:
    """Returns a boolean mask that is True where a query attends to a key. Its shape is [T, S], or [B, 1, T, S] with
    documents.
    """
    length, context = q_BHTC.shape[2], k_BKTC.shape[2]
    last_T1 = torch.arange(context - length, context, device=q_BHTC.device)[:, None]
    at_S = torch.arange(context, device=q_BHTC.device)
    mask: Tensor = at_S <= last_T1
    if window is not None:
        mask = mask & (at_S > last_T1 - window)
    if documents_BS is None:
        return mask
    return mask & (documents_BS[:, None, -length:, None] == documents_BS[:, None, None, :])


def _capped(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, spec: AttentionSpec, documents_BS: Tensor | None) -> Tensor:
    """Computes attention with Gemma 2's soft-cap, softcap * tanh(scores / softcap), which SDPA does not support."""
    assert spec.softcap is not None
    group = q_BHTC.shape[1] // k_BKTC.shape[1]
    k_BHTC, v_BHTC = k_BKTC.repeat_interleave(group, 1), v_BKTC.repeat_interleave(group, 1)
    scores_BHTS = q_BHTC @ k_BHTC.transpose(-1, -2) * spec.scale
    scores_BHTS = spec.softcap * torch.tanh(scores_BHTS / spec.softcap)
    mask = causal_mask(q_BHTC, k_BKTC, spec.window, documents_BS)
    scores_BHTS = scores_BHTS.masked_fill(~mask, float("-inf"))
    return scores_BHTS.float().softmax(-1).to(q_BHTC.dtype) @ v_BHTC


def flex(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, spec: AttentionSpec, documents_BS: Tensor | None = None
) -> Tensor:
    """Does the same as `attend`, but always uses FlexAttention. Returns the attention output out_BHTC."""
    run = _compiled_flex() if q_BHTC.is_cuda else cast("Callable[..., Any]", flex_attention)
    shape = q_BHTC.shape[2], k_BKTC.shape[2], spec.window
    out: Tensor = run(
        q_BHTC,
        k_BKTC,
        v_BKTC,
        score_mod=None if spec.softcap is None else _softcap(spec.softcap),
        block_mask=(
            _block_mask(*shape, q_BHTC.device)
            if documents_BS is None
            else _document_masks.of_shape(*shape, documents_BS)
        ),
        scale=spec.scale,
        enable_gqa=k_BKTC.shape[1] != q_BHTC.shape[1],
    )
    return out


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


@cache
def _softcap(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _block_mask(length: int, context: int, window: int | None, device: torch.device) -> BlockMask:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = query + (context - length)
        return key <= at if window is None else (key <= at) & (key > at - window)

    return create_block_mask(sees, None, None, length, context, device=device)


class _DocumentMasks:
    """The block masks of one step's documents, made once for all layers with the same window.

    Microbatches of a pipeline and pieces of context parallelism are views of one tensor. So a mask is cached by the
    memory of the documents that it was made from, as long as that tensor lives.
    """

    def __init__(self) -> None:
        self._documents: Tensor | None = None
        self._masks: dict[tuple[int, int, int | None, int], BlockMask] = {}

    def of_shape(self, length: int, context: int, window: int | None, documents_BS: Tensor) -> BlockMask:
        base = documents_BS if documents_BS._base is None else documents_BS._base
        if base is not self._documents:
            self._documents, self._masks = base, {}
        place = (length, context, window, documents_BS.data_ptr())
        if place not in self._masks:

            def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                at = query + (context - length)
                same = documents_BS[batch, at] == documents_BS[batch, key]
                return same & (key <= at) if window is None else same & (key <= at) & (key > at - window)

            rows = documents_BS.shape[0]
            self._masks[place] = create_block_mask(sees, rows, None, length, context, device=documents_BS.device)
        return self._masks[place]


_document_masks = _DocumentMasks()
