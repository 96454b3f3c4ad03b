"""Whom to evict, and how: what a sequence loses with its blocks, in tokens that would have to be computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.sequence import Sequence

__all__ = ["PreemptionCost", "SwapCost", "choose_victims", "preemption_cost"]


@dataclass(frozen=True, slots=True)
class SwapCost:
    """What moving one block out to the host and back takes, as the number of prompt tokens computed in that time."""

    tokens_per_block: float


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """Of an eviction. `swap`: it is cheaper to save the blocks on the host than to compute them again."""

    tokens: float
    swap: bool


def preemption_cost(seq: Sequence, pool: BlockPool, hashes: Items[bytes | None], cost: SwapCost) -> PreemptionCost:
    """The cheaper of computing again and swapping. `hashes` are of the blocks that hold computed tokens.

    What others hold too, or the host already holds, need not be computed again; the rest of the device's cache is
    taken for lost, since an eviction means that blocks are wanted.
    """
    one_way, size = cost.tokens_per_block / 2, pool.block_size
    kept, recompute, swap = seq.reads_cache, float(seq.num_computed), 0.0
    for block, block_hash in zip(seq.block_ids, hashes, strict=False):
        on_device, on_host = pool.device.refs[block] > 1, pool.host.find(block_hash) is not None
        swap += one_way * (not on_host) + one_way * (not on_device)
        kept = kept and block_hash is not None and (on_device or on_host)
        if kept:
            recompute -= size - one_way * (not on_device)
    if swap < recompute and pool.can_save(hashes):
        return PreemptionCost(swap, True)
    return PreemptionCost(recompute, False)


def choose_victims(
    candidates: Items[Sequence],
    missing: int,
    pool: BlockPool,
    wanted: Collection[int],
    tokens_lost: Callable[[Sequence], float],
) -> list[Sequence]:
    """The sequences to evict so that at least `missing` blocks beside the `wanted` ones come free, and at least one;
    none when that cannot be. Lower classes first, in a class those that lose least, then the latest.
    """
    lost = {seq.seq_id: tokens_lost(seq) for seq in candidates}
    chosen: list[Sequence] = []
    held: Counter[int] = Counter()
    freed = 0
    for seq in sorted(candidates, key=lambda seq: (-seq.level, lost[seq.seq_id], -seq.arrival)):
        chosen.append(seq)
        freed += _freed(seq, held, pool, wanted)
        if freed >= missing:
            break
    else:
        return []
    # Small ones that were taken before a large one that would have done alone are spared.
    for seq in sorted(chosen[:-1], key=lambda seq: (seq.level, -lost[seq.seq_id])):
        rest, held, freed = [each for each in chosen if each is not seq], Counter(), 0
        for each in rest:
            freed += _freed(each, held, pool, wanted)
        if freed >= missing:
            chosen = rest
    return chosen


def _freed(seq: Sequence, held: Counter[int], pool: BlockPool, wanted: Collection[int]) -> int:
    """How many more blocks come free with this sequence, after those whose blocks `held` counts."""
    held.update(seq.block_ids)
    refs = pool.device.refs
    return sum(held[block] == refs[block] and block not in wanted for block in seq.block_ids)
