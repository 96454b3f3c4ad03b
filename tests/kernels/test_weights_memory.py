"""Memory for packed weights: aligned, never shared by two of them, freed with the last one of a slab."""

from __future__ import annotations

import random

import psutil

from raytide.kernels.compiled import WeightsMemory

SIZES = (1, 63, 64, 65, 1000, 1 << 20, 9 << 20, 17 << 20)


def test_weights_begin_a_cache_line_and_do_not_overlap() -> None:
    memory, rng = WeightsMemory(), random.Random(0)
    taken = [memory.take(rng.choice(SIZES)) for _ in range(60)]
    for index, part in enumerate(taken):
        assert part.data_ptr() % 64 == 0
        part.fill_(index)
    assert all(bool((part == index).all()) for index, part in enumerate(taken))


def test_a_slab_ends_with_the_last_of_its_weights() -> None:
    memory, process = WeightsMemory(), psutil.Process()
    before = process.memory_info().rss
    taken = [memory.take(1 << 20).fill_(1) for _ in range(256)]
    assert len({part.untyped_storage().data_ptr() for part in taken}) == 8
    assert process.memory_info().rss - before > 200 << 20
    kept = taken[::128]
    del taken
    assert len(kept) == 2
    assert process.memory_info().rss - before < 120 << 20  # two slabs of 32 MiB, and the present one
