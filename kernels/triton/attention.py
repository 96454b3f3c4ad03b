"""Causal attention over the paged cache, for prefill chunks and for single new tokens.

A program computes a block of rows, (new tokens) x (query heads of one KV head), so that keys and values are read once
for all heads that share them. If sequences are few and contexts long, each context is split among several programs, and
a second kernel joins the splits' results. The device itself computes, from the context length, which splits have work.
A captured graph therefore stays correct as contexts grow. Scores and sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from raytide.kernels import ref
from raytide.kernels.core import AttentionSpec, PagedBatch
from raytide.kernels.triton.dot import INTERPRETED, dot
from raytide.kernels.triton.geometry import DecodeBatch, lens_on_device, longest_context, query_blocks
from raytide.kernels.triton.support import fits, gpu_variant, num_processors

Tensor = torch.Tensor

_FEWEST_ROWS = 16  # of a matrix instruction
_MOST_SPLITS = 16
_TILES_OF_A_SPLIT = 4  # fewer are not worth the joining
_PROGRAMS_PER_PROCESSOR = 2
_LARGEST_DIM = 256


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit(do_not_specialize=["table_width", "num_slots", "window"])
def attention_kernel(
    q,
    cache,
    out,
    parts,
    weights,
    blocks,
    lens,
    tables,
    table_width,
    q_stride,
    num_slots,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    GROUP_P2: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES_OF_A_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes attention on the grid (blocks, KV heads, splits).

    - With one split, it writes the result to `out` [T, H, D].
    - With several splits, it writes each split's weighted mean of the values to `parts` [blocks, KV heads, splits,
      rows, D], and the base-2 logarithm of each split's weight to `weights`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(blocks + 2 * block)
    first = tl.load(blocks + 2 * block + 1)
    start = tl.load(lens + 3 * sequence)
    query_len = tl.load(lens + 3 * sequence + 1)
    before = tl.load(lens + 3 * sequence + 2) - query_len  # context tokens before the chunk

    row = tl.arange(0, ROWS)
    token = first + row // GROUP_P2
    member = row % GROUP_P2
    is_row = (token < query_len) & (member < GROUP)
    position = before + token
    dim = tl.arange(0, DIM_P2)
    is_dim = dim < DIM
    head_at = (kv_head * GROUP + member) * DIM
    q_at = (start + token).to(tl.int64) * q_stride + head_at
    queries = tl.load(q + q_at[:, None] + dim[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)

    end = before + tl.minimum(first + ROWS // GROUP_P2, query_len)
    tile, last_tile = 0, tl.cdiv(end, TILE)
    if HAS_WINDOW:
        tile = tl.maximum(before + first + 1 - window, 0) // TILE
    if SPLITS > 1:
        tiles = last_tile - tile
        working = tl.minimum(tl.cdiv(tiles, TILES_OF_A_SPLIT), SPLITS)
        per_split = tl.cdiv(tiles, working)
        tile += split * per_split
        last_tile = tl.minimum(tile + per_split, last_tile)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM_P2], tl.float32)
    table = tables + sequence.to(tl.int64) * table_width
    values = cache + num_slots.to(tl.int64) * (KV_HEADS * DIM)
    for at in range(tile, last_tile):
        key = at * TILE + tl.arange(0, TILE)
        is_key = key < end
        slot = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        kv_at = (slot * KV_HEADS + kv_head) * DIM
        keys = tl.load(cache + kv_at[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        scores = dot(queries, keys, UPCAST) * scale
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores / softcap)
        seen = is_row[:, None] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen no key yet
        shares = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(shares, 1)
        found = tl.load(values + kv_at[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        sums = sums * shrink[:, None] + dot(shares.to(found.dtype), found, UPCAST)
        peak = new_peak

    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        out_at = (start + token).to(tl.int64) * (HEADS * DIM) + head_at
        tl.store(
            out + out_at[:, None] + dim[None, :],
            result.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_dim[None, :],
        )
    else:
        part = ((block.to(tl.int64) * KV_HEADS + kv_head) * SPLITS + split) * ROWS + row
        tl.store(weights + part, peak + tl.log2(tl.where(total > 0, total, 1.0)), mask=is_row)
        if tile < last_tile:
            tl.store(parts + part[:, None] * DIM + dim[None, :], result, mask=is_row[:, None] & is_dim[None, :])


@triton.jit
def join_kernel(
    parts,
    weights,
    out,
    blocks,
    lens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    GROUP_P2: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Joins the results of the splits. Writes the weighted mean of the splits' means.

    The grid is (blocks, heads, tokens of a block).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    block, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(blocks + 2 * block)
    at = tl.load(blocks + 2 * block + 1) + token
    if at < tl.load(lens + 3 * sequence + 1):
        split = tl.arange(0, SPLITS)
        part = (block.to(tl.int64) * KV_HEADS + head // GROUP) * SPLITS + split
        part = part * ROWS + token * GROUP_P2 + head % GROUP
        weight = tl.load(weights + part)
        share = tl.exp2(weight - tl.max(weight, 0))  # a split without keys wrote -inf, and no mean
        dim = tl.arange(0, DIM_P2)
        mask = (share > 0)[:, None] & (dim < DIM)[None, :]
        means = tl.load(parts + part[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        joined = tl.sum(means * share[:, None], 0) / tl.sum(share, 0)
        row = ((tl.load(lens + 3 * sequence) + at).to(tl.int64) * HEADS + head) * DIM
        tl.store(out + row + dim, joined.to(out.dtype.element_ty), mask=dim < DIM)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """The tile of one program: its numbers of rows and keys, and its numbers of warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_for(group_p2: int, dim_p2: int, itemsize: int, is_decode: bool) -> AttentionTile:
    """Returns a tile that does not spill registers. Its keys and values need less than 99 KB of shared memory (64 KB on
    ROCm).
    """
    head_bytes, is_rocm = dim_p2 * itemsize, bool(torch.version.hip)
    rows = max(_FEWEST_ROWS if is_decode else 64 if head_bytes <= 256 else 32, group_p2)
    keys = max(16, min(32, 8192 // head_bytes) if is_rocm else min(64, 16384 // head_bytes))
    return AttentionTile(rows, keys, 8 if rows >= 64 and not is_rocm else 4, 1 if is_rocm else 2)


@gpu_variant("attention")
def attention(batch: PagedBatch, spec: AttentionSpec) -> Callable[[Tensor, Tensor], Tensor]:
    lens_B3 = lens_on_device(batch)
    launches: dict[tuple[int, int, int], list[_Launch]] = {}

    def attend(q_THD: Tensor, cache_2SKD: Tensor) -> Tensor:
        heads, dim = q_THD.shape[1:]
        kv_heads = cache_2SKD.shape[2]
        if not (
            fits(q_THD, cache_2SKD)
            and cache_2SKD.is_contiguous()
            and q_THD.stride(1) == dim <= _LARGEST_DIM
            and heads % kv_heads == 0
        ):
            if isinstance(batch, DecodeBatch):
                raise RuntimeError(f"attention: no kernel for {heads} heads of {dim} in {q_THD.dtype}.")
            return ref.attention(batch, spec)(q_THD, cache_2SKD)
        out_THD = q_THD.new_empty(q_THD.shape)
        group_p2, dim_p2 = triton.next_power_of_2(heads // kv_heads), max(triton.next_power_of_2(dim), 16)
        shape = (group_p2, dim_p2, kv_heads)
        if shape not in launches:
            launches[shape] = _plan(batch, *shape, q_THD.element_size())
        with torch.cuda.device_of(q_THD):
            for launch in launches[shape]:
                _launch(launch, batch, spec, lens_B3, q_THD, cache_2SKD, out_THD)
        return out_THD

    return attend


@dataclass(frozen=True, slots=True)
class _Launch:
    """The blocks of rows that one launch computes, each over its whole context or over `splits` parts of it."""

    blocks_I2: Tensor
    tile: AttentionTile
    splits: int
    most_tokens: int  # of a sequence, and no more than a block has


def _plan(batch: PagedBatch, group_p2: int, dim_p2: int, kv_heads: int, itemsize: int) -> list[_Launch]:
    launches = []
    narrow = max(_FEWEST_ROWS, group_p2) // group_p2  # tokens of the smallest block
    for is_decode in (True, False):
        members = [b for b, query_len in enumerate(batch.query_lens) if (query_len <= narrow) == is_decode]
        if members:
            tile = tile_for(group_p2, dim_p2, itemsize, is_decode)
            blocks_I2 = query_blocks(batch, members, tile.rows // group_p2)
            programs, tiles = len(blocks_I2) * kv_heads, triton.cdiv(longest_context(batch, members), tile.keys)
            splits = num_splits(programs, tiles, batch.block_tables_BM.device)
            most_tokens = min(max(batch.query_lens[b] for b in members), tile.rows // group_p2)
            launches.append(_Launch(blocks_I2, tile, splits, most_tokens))
    return launches


def num_splits(programs: int, tiles: int, device: torch.device) -> int:
    """Returns the number of parts into which each context is split, a power of two.

    The number is large enough to give work to all processors if possible. It is never so large that joining the parts
    costs more than the split saves.
    """
    wanted = min(_PROGRAMS_PER_PROCESSOR * num_processors(device) // programs, tiles // _TILES_OF_A_SPLIT, _MOST_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def _launch(
    launch: _Launch,
    batch: PagedBatch,
    spec: AttentionSpec,
    lens_B3: Tensor,
    q_THD: Tensor,
    cache_2SKD: Tensor,
    out_THD: Tensor,
) -> None:
    heads, dim = q_THD.shape[1:]
    _, num_slots, kv_heads, _ = cache_2SKD.shape
    tile, splits, num_blocks = launch.tile, launch.splits, len(launch.blocks_I2)
    group_p2, dim_p2 = triton.next_power_of_2(heads // kv_heads), max(triton.next_power_of_2(dim), 16)
    parts = weights = lens_B3  # not read with one split
    if splits > 1:
        part_rows = num_blocks * kv_heads * splits * tile.rows
        parts, weights = (out_THD.new_empty(shape, dtype=torch.float32) for shape in ((part_rows, dim), (part_rows,)))
    attention_kernel[(num_blocks, kv_heads, splits)](
        q_THD,
        cache_2SKD,
        out_THD,
        parts,
        weights,
        launch.blocks_I2,
        lens_B3,
        batch.block_tables_BM,
        batch.block_tables_BM.stride(0),
        q_THD.stride(0),
        num_slots,
        spec.scale,
        spec.softcap or 0.0,
        spec.window or 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_P2=dim_p2,
        GROUP_P2=group_p2,
        ROWS=tile.rows,
        TILE=tile.keys,
        BLOCK_SIZE=batch.block_size,
        HAS_WINDOW=spec.window is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        SPLITS=splits,
        TILES_OF_A_SPLIT=_TILES_OF_A_SPLIT,
        UPCAST=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        join_kernel[(num_blocks, heads, launch.most_tokens)](
            parts,
            weights,
            out_THD,
            launch.blocks_I2,
            lens_B3,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            DIM_P2=dim_p2,
            GROUP_P2=group_p2,
            ROWS=tile.rows,
            SPLITS=splits,
        )
