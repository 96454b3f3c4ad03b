"""Random steps of paged attention."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from raytide.kernels.core import PagedBatch


def paged_batch(queries: list[int], contexts: list[int], block_size: int, seed: int = 0) -> PagedBatch:
    """Sequences of these lengths over blocks in random order."""
    widths = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(seed)).tolist()
    tables = torch.zeros(len(queries), max(widths), dtype=torch.int64)
    slots = []
    for b, (query, context, width) in enumerate(zip(queries, contexts, widths, strict=True)):
        tables[b, :width] = torch.tensor([order.pop() for _ in range(width)])
        slots += [
            int(tables[b, at // block_size]) * block_size + at % block_size for at in range(context - query, context)
        ]
    return PagedBatch(queries, contexts, tables, torch.tensor(slots), block_size)


@st.composite
def batches(draw: st.DrawFn) -> PagedBatch:
    """Ragged mixes of decodes and prefill chunks, block and tile edges among their lengths."""
    block_size = draw(st.sampled_from([1, 3, 8, 32]))
    queries = draw(st.lists(st.sampled_from([1, 1, 1, 2, 7, 20, 65]), min_size=1, max_size=8))
    contexts = [query + draw(st.sampled_from([0, 0, 1, 5, 31, 63, 64, 255, 300])) for query in queries]
    return paged_batch(queries, contexts, block_size, draw(st.integers(0, 99)))


def num_slots(batch: PagedBatch) -> int:
    return (int(batch.block_tables_BM.max()) + 1) * batch.block_size
