"""Normalizes and rotates query and key heads in place, and writes keys and values into the cache, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raytide.kernels import ref
from raytide.kernels.core import HeadNorms, Rope
from raytide.kernels.triton.support import fits, gpu_variant

Tensor = torch.Tensor

_HEADS = 8  # heads of one token that a program computes
_LARGEST_TILE = 4096


@triton.jit
def _weight_of_head(q_weight, k_weight, at, inside, head, HEADS: tl.constexpr):
    of_query = tl.load(q_weight + at, mask=inside & (head < HEADS), other=0.0).to(tl.float32)
    return of_query + tl.load(k_weight + at, mask=inside & (head >= HEADS), other=0.0).to(tl.float32)


@triton.jit
def rope_write_kernel(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    cache,
    slots,
    num_slots,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_P2: tl.constexpr,
    REST_P2: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Processes each head as three parts: two halves that rotate into each other, and the rest.

    The same thread reads and writes both numbers of a pair that rotates. Therefore the thread has read both numbers
    before it overwrites one of them.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_head = head < HEADS + 2 * KV_HEADS
    is_kv = is_head & (head >= HEADS)
    turns = head < HEADS + KV_HEADS
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM
    # Head HEADS + i is key i, the next KV_HEADS are the values, which stand num_slots rows later.
    kv_head = head - HEADS
    is_value = kv_head >= KV_HEADS
    slot = tl.load(slots + token) + tl.where(is_value, num_slots, 0)
    target = cache + (slot * KV_HEADS + tl.where(is_value, kv_head - KV_HEADS, kv_head))[:, None] * DIM

    pair = tl.arange(0, HALF_P2)[None, :]
    in_pair = is_head[:, None] & (pair < HALF)
    rest = 2 * HALF + tl.arange(0, REST_P2)[None, :]
    in_rest = is_head[:, None] & (rest < DIM)
    left = tl.load(source + rest, mask=in_rest, other=0.0)
    if HALF > 0:
        first = tl.load(source + pair, mask=in_pair, other=0.0)
        second = tl.load(source + HALF + pair, mask=in_pair, other=0.0)

    if HAS_NORMS:
        wide = left.to(tl.float32)
        squares = tl.sum(wide * wide, 1)
        if HALF > 0:
            a, b = first.to(tl.float32), second.to(tl.float32)
            squares += tl.sum(a * a + b * b, 1)
        scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        by = _weight_of_head(q_weight, k_weight, rest, in_rest, head[:, None], HEADS)
        left = tl.where(turns[:, None], wide * scale * by, wide).to(left.dtype)
        if HALF > 0:
            by_first = _weight_of_head(q_weight, k_weight, pair, in_pair, head[:, None], HEADS)
            by_second = _weight_of_head(q_weight, k_weight, HALF + pair, in_pair, head[:, None], HEADS)
            first = tl.where(turns[:, None], a * scale * by_first, a).to(first.dtype)
            second = tl.where(turns[:, None], b * scale * by_second, b).to(second.dtype)

    if HALF > 0:
        angle = token * (2 * HALF) + pair
        is_angle = pair < HALF
        cos_first = tl.load(cos + angle, mask=is_angle, other=0.0).to(tl.float32)
        cos_second = tl.load(cos + angle + HALF, mask=is_angle, other=0.0).to(tl.float32)
        sin_first = tl.load(sin + angle, mask=is_angle, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + angle + HALF, mask=is_angle, other=0.0).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first = tl.where(turns[:, None], a * cos_first + b * sin_first, a).to(first.dtype)
        second = tl.where(turns[:, None], b * cos_second + a * sin_second, b).to(second.dtype)
        tl.store(source + pair, first, mask=in_pair & turns[:, None])
        tl.store(source + HALF + pair, second, mask=in_pair & turns[:, None])
        tl.store(target + pair, first, mask=in_pair & is_kv[:, None])
        tl.store(target + HALF + pair, second, mask=in_pair & is_kv[:, None])
    if HAS_NORMS:
        tl.store(source + rest, left, mask=in_rest & turns[:, None])
    tl.store(target + rest, left, mask=in_rest & is_kv[:, None])


@gpu_variant("rope_write", invariant=True)
def rope_write(
    qkv_TAD: Tensor, rope: Rope | None, norms: HeadNorms | None, cache_2SKD: Tensor, slots_T: Tensor
) -> None:
    cos, sin = (rope.cos_TR, rope.sin_TR) if rope is not None else (None, None)
    weights = (norms.q_D, norms.k_D) if norms is not None else (None, None)
    whole = (qkv_TAD, cache_2SKD, slots_T, *(t for t in (cos, sin) if t is not None))
    if not fits(qkv_TAD, cache_2SKD, cos, sin, *weights) or not all(t.is_contiguous() for t in whole):
        ref.rope_write(qkv_TAD, rope, norms, cache_2SKD, slots_T)
        return
    tokens, heads, dim = qkv_TAD.shape
    kv_heads, half = cache_2SKD.shape[2], cos.shape[1] // 2 if cos is not None else 0
    if not tokens:
        return
    block = max(1, min(_HEADS, _LARGEST_TILE // dim))
    with torch.cuda.device_of(qkv_TAD):
        rope_write_kernel[(tokens, triton.cdiv(heads, block))](
            qkv_TAD,
            cos if cos is not None else qkv_TAD,
            sin if sin is not None else qkv_TAD,
            weights[0] if weights[0] is not None else qkv_TAD,
            weights[1] if weights[1] is not None else qkv_TAD,
            cache_2SKD,
            slots_T,
            cache_2SKD.shape[1],
            norms.eps if norms is not None else 0.0,
            HEADS=heads - 2 * kv_heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            HALF=half,
            HALF_P2=triton.next_power_of_2(max(half, 1)),
            REST_P2=triton.next_power_of_2(max(dim - 2 * half, 1)),
            HAS_NORMS=norms is not None,
            BLOCK=block,
            num_warps=2,
        )
