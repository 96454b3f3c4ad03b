"""Chooses which sequences to evict. The cost of an eviction is measured in tokens that would have to be computed
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SwapCost:
    """The cost of moving one block to host memory and back, as the number of prompt tokens that could be computed in
    that time.
    """

    tokens_per_block: float


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """The cost of an eviction, in tokens of computation. `swap` is True if saving the blocks in host memory is cheaper
    than computing them again.
    """

    tokens: float
    swap: bool


def preemption_cost(seq: Sequence, pool: BlockPool, hashes: Items[bytes | None], cost: SwapCost) -> PreemptionCost:
    """Returns the cost of evicting a sequence, by recomputation or by swapping, whichever is cheaper.

    `hashes` are the hashes of the blocks that hold computed tokens. A block that another sequence uses, or that is in
    host memory, need not be computed again. All other cached blocks on the device count as lost, since an eviction
    happens only when blocks are needed.
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
    """Returns the sequences to evict so that `missing` blocks become free. Blocks in `wanted` do not count as free. If
    the candidates have enough blocks, the result contains at least one sequence. Otherwise it is empty.

    The less urgent sequences, whose level is higher, are evicted first. Among sequences of equal level, those with
    the lowest cost are evicted first, and at equal cost the latest arrivals.
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
    # Small ones chosen before a large one that suffices alone are spared.
    for seq in sorted(chosen[:-1], key=lambda seq: (seq.level, -lost[seq.seq_id])):
        rest, held, freed = [each for each in chosen if each is not seq], Counter(), 0
        for each in rest:
            freed += _freed(each, held, pool, wanted)
        if freed >= missing:
            chosen = rest
    return chosen


def _freed(seq: Sequence, held: Counter[int], pool: BlockPool, wanted: Collection[int]) -> int:
    """Returns how many blocks this sequence frees in addition to the sequences counted in `held`, and adds its blocks
    to `held`.
    """
    held.update(seq.block_ids)
    refs = pool.device.refs
    return sum(held[block] == refs[block] and block not in wanted for block in seq.block_ids)
