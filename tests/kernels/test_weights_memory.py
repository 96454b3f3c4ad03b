"""Memory for packed weights: aligned, never shared by two of them, freed with the last one of a slab."""

from __future__ import annotations

import random
import weakref

import numpy as np
import pytest
import torch

from raytide.kernels import compiled
from raytide.kernels.compiled import WeightsMemory

SIZES = (1, 63, 64, 65, 1000, 1 << 20, 9 << 20, 17 << 20)


def test_weights_begin_a_cache_line_and_do_not_overlap() -> None:
    memory, rng = WeightsMemory(), random.Random(0)
    taken = [memory.take(rng.choice(SIZES)) for _ in range(60)]
    for index, part in enumerate(taken):
        assert part.data_ptr() % 64 == 0
        part.fill_(index)
    assert all(bool((part == index).all()) for index, part in enumerate(taken))


def test_a_slab_ends_with_the_last_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs: list[weakref.ref[np.ndarray]] = []

    def slab(size: int) -> torch.Tensor:
        memory = np.empty(size, np.uint8)
        slabs.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    monkeypatch.setattr(compiled, "_huge", slab)
    memory = WeightsMemory()
    taken = [memory.take(1 << 20) for _ in range(256)]
    assert len(slabs) == 8
    kept = taken[::128]
    del taken
    assert [index for index, each in enumerate(slabs) if each() is not None] == [0, 4, 7]  # 7: the present one
    assert len(kept) == 2
