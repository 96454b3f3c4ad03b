"""Published memory figures, to the digit that their papers print."""

from __future__ import annotations

import pytest

from raytide.sizing.memory.published import (
    GIB,
    MegatronModel,
    Recompute,
    deepspeed_state_bytes,
    korthikanti_layer_bytes,
    megatron_state_bytes,
    zero_state_bytes,
)

MODELS = {
    "22B": (MegatronModel(6144, 64, 48, 8, 1, 4, 1), 45.5625, 59.25, 9.5625),
    "175B": (MegatronModel(12288, 96, 96, 8, 8, 1, 3), 45.5625, 66.84375, 12.3515625),
    "530B": (MegatronModel(20480, 128, 105, 8, 35, 1, 3), 31.640625, 114.0234375, 23.076171875),
    "1T": (MegatronModel(25600, 160, 128, 8, 64, 1, 1), 32.958984375, 131.25, 26.5625),
}


@pytest.mark.parametrize("name", MODELS)
def test_korthikanti_figure_1(name: str) -> None:
    """arXiv 2205.05198: weights and optimizer, activations without and with sequence parallelism and recomputation."""
    model, states, plain, selective = MODELS[name]
    assert model.state_bytes / GIB == states
    assert model.activation_bytes(sequence_parallel=False, recompute="none") / GIB == plain
    assert model.activation_bytes(sequence_parallel=True, recompute="selective") / GIB == selective


@pytest.mark.parametrize(
    ("tensor", "sequence", "recompute", "gib"),
    [
        (1, False, "none", 2.67),
        (8, False, "none", 0.539),
        (8, True, "none", 0.334),
        (8, True, "selective", 0.0996),
        (1, False, "full", 0.0469),
    ],
)
def test_korthikanti_table_2_for_a_layer_of_175b(tensor: int, sequence: bool, recompute: Recompute, gib: float) -> None:
    found = korthikanti_layer_bytes(2048, 1, 12288, 96, tensor=tensor, sequence_parallel=sequence, recompute=recompute)
    assert found / GIB == pytest.approx(gib, rel=2e-3)


def test_zero_stages() -> None:
    """arXiv 1910.02054, figure 1: 7.5e9 parameters on 64 devices, and 1e12 on 1,024."""
    assert [zero_state_bytes(7.5e9, 64, stage) / 1e9 for stage in (0, 1, 2, 3)] == [120, 31.40625, 16.640625, 1.875]
    assert zero_state_bytes(1e12, 1024, 3) / 1e9 == 15.625
    assert zero_state_bytes(175e9, 1, 0) / 1e12 == pytest.approx(2.8)
    assert zero_state_bytes(405.853e9, 1, 0) / 1e12 == pytest.approx(6.49, abs=0.005)


def test_deepspeeds_estimator() -> None:
    """The examples in DeepSpeed's docs: 6.09 GiB for T0 3B on 8 GPUs, 3,291 MiB for 737e6 parameters on 4."""
    assert deepspeed_state_bytes(2851e6, 32e6, 8, 3) / GIB == pytest.approx(6.09, abs=0.005)
    assert deepspeed_state_bytes(737.67e6, 32.90e6, 4, 3) / 2**20 == pytest.approx(3291, abs=0.5)
    assert deepspeed_state_bytes(1e9, 0, 1, 2) == 20e9


def test_megatrons_distributed_optimizer() -> None:
    assert [megatron_state_bytes(1.0, 1, each) for each in ("bf16", "fp16", "fp32")] == [18, 20, 16]
