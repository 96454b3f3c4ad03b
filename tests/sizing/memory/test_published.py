"""The planner's own bytes against published memory figures."""

from __future__ import annotations

import pytest
from tests.sizing.published_models import gpt

from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import MemorySpec
from raytide.sizing.memory.activations import Slice, checkpoint_bytes, layer_bytes
from raytide.sizing.memory.states import rank_states
from raytide.sizing.workload import Strategy, TrainWorkload

SEQ = 2048
KORTHIKANTI = [(6144, 64, 4), (12288, 96, 1), (20480, 128, 1), (25600, 160, 1)]
"""Width, heads and micro-batch of 22B, 175B, 530B and 1T (arXiv 2205.05198, table 3)."""


@pytest.mark.parametrize(("width", "heads", "sequences"), KORTHIKANTI)
@pytest.mark.parametrize("tensor", [1, 8])
def test_a_layer_keeps_what_korthikanti_counts_without_dropout(
    width: int, heads: int, sequences: int, tensor: int
) -> None:
    """Table 2: 34 sbh / t with sequence parallelism, and the scores recomputed, of which 2 sbh are masks of dropout.

    The paper leaves out the statistics of the norms and of the softmax.
    """
    part = Slice(sequences, SEQ, tensor)
    tokens = sequences * SEQ / tensor
    statistics = tokens * 2 * 8 + sequences * SEQ * 4 * heads / tensor
    inputs = 2 * 2 * width * (sequences * SEQ - tokens)  # gathered for the two products, which the paper divides
    found = layer_bytes(gpt(1, width, heads), part) - statistics - inputs
    assert found == (34 - 2) * tokens * width


def test_the_published_gib_of_a_layer_of_175b() -> None:
    """Table 2 prints 0.797 GiB for 34 sbh; full recomputation keeps the layer's input alone, 2 sbh: 0.0469 GiB."""
    model, part = gpt(1, 12288, 96), Slice(1, SEQ)
    assert layer_bytes(model, part) / 2**30 == pytest.approx(0.797 * 32 / 34, rel=2e-3)
    assert checkpoint_bytes(model, part, MemorySpec(checkpointing="full")) / 2**30 == pytest.approx(0.0469, rel=2e-3)


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_sixteen_bytes_a_parameter_are_divided_as_by_zero_3(ranks: int) -> None:
    """arXiv 1910.02054, figure 1: 120 GB for 7.5e9 parameters, 1.88 GB on each of 64 ranks."""
    model = gpt(36, 4096, 32)
    layout = Parallelism()
    workload = TrainWorkload(model, SEQ, 64)
    found = rank_states(workload, Strategy(layout.sizes(ranks), layout))
    bytes_each = (found.weights + found.gradients + found.optimizer) / model.parameters
    assert bytes_each == pytest.approx(16 / ranks, rel=1e-4)
    assert bytes_each * 7.5 == pytest.approx({1: 120, 8: 15, 64: 1.875}[ranks], rel=1e-3)
