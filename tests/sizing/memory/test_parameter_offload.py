"""Weights and gradients that are not on the device are counted where they are, and their copies take time."""

from __future__ import annotations

import pytest

from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import MemorySpec
from raytide.sizing.devices import DEVICES
from raytide.sizing.memory.estimate import Hardware, estimate_rank
from raytide.sizing.memory.states import rank_states
from raytide.sizing.model_shape import MODELS
from raytide.sizing.step_time import step_time
from raytide.sizing.workload import STATE_BYTES, Strategy, TrainWorkload


def rank_of(memory: MemorySpec, global_batch: int = 16) -> tuple[TrainWorkload, Strategy]:
    layout = Parallelism()
    return TrainWorkload(MODELS["llama-3-8b"], 4096, global_batch), Strategy(layout.sizes(8), layout, 1, memory)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_all_states_of_eight_billion_parameters_are_where_they_are_put(place: str) -> None:
    memory = MemorySpec.parse({"parameters": place, "optimizer": place}, where="memory")
    workload, strategy = rank_of(memory)
    states = rank_states(workload, strategy)
    found, resident = (
        estimate_rank(workload, each, Hardware(80e9)) for each in (strategy, strategy.with_memory(parameters="none"))
    )
    assert (found.weights, found.gradients, found.optimizer, found.earlier_gradients) == (0, 0, 0, 0.0)
    whole = states.weights + states.gradients + states.optimizer
    assert (found.host, found.disk) == ((whole, 0.0) if place == "cpu" else (0.0, whole))
    assert whole == pytest.approx(16 * 8_030_261_248 / 8, rel=1e-3), "16 bytes a parameter, over eight ranks"
    assert found.gathered == resident.gathered
    assert resident.peak - found.peak == pytest.approx((states.weights + states.gradients) / 0.93, rel=1e-6)


def test_one_rank_in_fp32_needs_two_layers_and_the_ends() -> None:
    memory = MemorySpec(parameters="disk", optimizer="disk")
    layout = Parallelism()
    strategy = Strategy(layout.sizes(1), layout, 1, memory)
    workload = TrainWorkload(MODELS["llama-3-8b"], 4096, 4, precision="fp32")
    states = rank_states(workload, strategy)
    found = estimate_rank(workload, strategy, Hardware.cpu())
    assert found.gathered == STATE_BYTES * (states.outside + 2 * states.largest_layer)


def test_copies_that_computation_hides_cost_nothing_and_the_others_their_bytes() -> None:
    on_device, on_host, on_disk = (
        step_time(*rank_of(memory), DEVICES["H100"], 8).parts["offload"]
        for memory in (
            MemorySpec(optimizer="cpu"),
            MemorySpec(parameters="cpu", optimizer="cpu"),
            MemorySpec(parameters="disk", optimizer="disk"),
        )
    )
    assert 0 < on_device < on_host < on_disk
    states = rank_states(*rank_of(MemorySpec()))
    update_s = (2 * states.weights + 2 * states.gradients) / 25e9
    assert on_host - on_device >= update_s * 0.5
