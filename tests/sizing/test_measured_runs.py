"""The planner against published runs of torchtitan and Megatron-LM: within a tenth, after one row of calibration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sizing.published_models import gpt

from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import MemorySpec
from raytide.sizing.calibration import Corrections, MeasuredRun, learn, solve_pace
from raytide.sizing.devices import DEVICES, Accelerator, cpu_device, with_figures
from raytide.sizing.memory.activations import Slice, last_bytes
from raytide.sizing.memory.estimate import CONTEXT_BYTES, FRAGMENTATION, Hardware, estimate
from raytide.sizing.memory.states import rank_states
from raytide.sizing.model_shape import MODELS
from raytide.sizing.step_time import step_time
from raytide.sizing.workload import Strategy, TrainWorkload

GIB = 2**30
H100 = DEVICES["H100"]
A100 = replace(DEVICES["A100-80G"], attention_efficiency=0.3)
"""Megatron's runs are older than FlashAttention."""


def titan(gpus: int) -> tuple[TrainWorkload, Strategy]:
    """Llama 3.1 8B, sequences of 8,192, two on each GPU, selective checkpointing, FSDP (benchmarks of 2024-12)."""
    layout = Parallelism()
    memory = MemorySpec(checkpointing="selective")
    return TrainWorkload(MODELS["llama-3-8b"], 8192, 2 * gpus), Strategy(layout.sizes(gpus), layout, 2, memory)


@pytest.mark.parametrize(("gpus", "tokens_per_s", "mfu"), [(8, 5762, 0.337), (128, 5605, 0.328)])
def test_torchtitans_llama_3_8b(gpus: int, tokens_per_s: float, mfu: float) -> None:
    found = step_time(*titan(gpus), H100, 8)
    assert found.tokens_per_s / gpus == pytest.approx(tokens_per_s, rel=0.1)
    assert found.mfu == pytest.approx(mfu, rel=0.1)


def test_torchtitans_compiled_row_is_predicted_from_the_eager_one() -> None:
    workload, strategy = titan(8)
    found = step_time(workload, strategy.with_memory(compile=True), H100, 8)
    assert found.tokens_per_s / 8 == pytest.approx(6667, rel=0.1)


def test_the_published_rate_is_the_published_utilization() -> None:
    flops = MODELS["llama-3-8b"].flops_per_token(8192)
    assert 5762 * flops / 989.4e12 == pytest.approx(0.337, abs=5e-4)
    assert 6667 * flops / 989.4e12 == pytest.approx(0.390, abs=5e-4)


def test_torchtitans_memory_of_llama_3_8b() -> None:
    """82.4 GiB a GPU: its selective checkpointing keeps every second product (q, v, gate, down) and attention, its loss
    holds logits in bf16 and fp32 with their log-probabilities and gradient."""
    workload, strategy = titan(8)
    model, tokens = workload.model, 2 * 8192
    states = rank_states(workload, strategy)
    kept = model.width + model.attention_width  # the layer's input, attention's output
    products = model.attention_width + model.kv_width + model.ffn + model.width
    activations = 2 * model.layers * tokens * (kept + products)
    saved, beside = last_bytes(model, Slice(2, 8192), 0)
    loss = saved + beside + 2 * tokens * model.vocab
    gathered = 2 * (states.outside + 2 * states.largest_layer)
    allocated = states.weights + states.gradients + states.optimizer + activations + loss + gathered
    peak = allocated / (1 - FRAGMENTATION) + CONTEXT_BYTES
    assert peak / GIB == pytest.approx(82.4, rel=0.1)


def test_llama_parameters() -> None:
    sizes = {name: model.parameters for name, model in MODELS.items()}
    assert sizes["llama-3-8b"] == 8_030_261_248
    assert sizes["llama-3-70b"] == 70_553_706_496
    assert sizes["llama-3-405b"] == 405_853_388_800


MEGATRON = {
    # model, batch, pipeline, interleaved stages, micro-batch, seconds with full and with selective recomputation
    "22B": (gpt(48, 6144, 64), 4, 1, 1, 4, 1.42, 1.10),
    "175B": (gpt(96, 12288, 96), 64, 8, 3, 1, 18.13, 13.75),
    "530B": (gpt(105, 20480, 128), 280, 35, 3, 1, 49.05, 37.83),
    "1T": (gpt(128, 25600, 160), 512, 64, 1, 1, 94.42, 71.49),
}
"""arXiv 2205.05198, table 5: tensor parallelism of 8 on A100 of 80 GB."""


def megatron(name: str, checkpointing: str) -> tuple[TrainWorkload, Strategy]:
    model, batch, pipeline, stages, micro, *_ = MEGATRON[name]
    schedule = {"schedule": "interleaved_1f1b", "stages": stages} if stages > 1 else {}
    layout = Parallelism.parse({"tensor": 8, "pipeline": pipeline, **schedule}, where=name)
    memory = MemorySpec.model_validate({"checkpointing": checkpointing})
    return TrainWorkload(model, 2048, batch), Strategy(layout.sizes(8 * pipeline), layout, micro, memory)


@pytest.fixture(scope="module")
def calibrated() -> Accelerator:
    """An A100 with the pace of one row: 175B with selective recomputation."""
    workload, strategy = megatron("175B", "none")
    return learn([MeasuredRun(workload, strategy, A100, 8, MEGATRON["175B"][6])]).apply(A100)


@pytest.mark.parametrize("name", MEGATRON)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_megatrons_steps(calibrated: Accelerator, name: str, recompute: str) -> None:
    """Megatron's selective recomputation only redoes what FlashAttention never keeps: `none` here."""
    seconds = MEGATRON[name][5 if recompute == "full" else 6]
    workload, strategy = megatron(name, "full" if recompute == "full" else "none")
    found = step_time(workload, strategy, calibrated, 8).total
    assert found == pytest.approx(seconds, rel=0.1)


def test_what_a_run_measures_corrects_the_next_plan() -> None:
    workload, strategy = titan(8)
    slow = replace(H100, pace=2.4)
    seconds = step_time(workload, strategy, slow, 8).total
    found = learn([MeasuredRun(workload, strategy, H100, 8, seconds)])
    assert found.pace["H100"] == pytest.approx(2.4, rel=1e-6)
    assert step_time(workload, strategy, found.apply(H100), 8).total == pytest.approx(seconds)
    assert found.apply(A100) == A100


def test_a_run_that_measured_something_else_is_left_out() -> None:
    workload, strategy = titan(8)
    stalled = MeasuredRun(workload, strategy, H100, 8, 1e6)
    assert solve_pace(stalled) is None
    assert learn([stalled]) == Corrections()


def test_measured_memory_scales_activations_only() -> None:
    workload, strategy = titan(8)
    bare = Hardware(80e9, fragmentation=0.0, context_bytes=0.0)
    predicted = estimate(workload, strategy, bare)
    more = predicted.peak + 0.2 * predicted.terms["activations"]
    run = MeasuredRun(workload, strategy, H100, 8, step_time(workload, strategy, H100, 8).total, more)
    scale = learn([run]).memory["H100"]
    assert scale == pytest.approx(1.2)
    scaled = estimate(workload, strategy, replace(bare, activation_scale=scale))
    assert scaled.peak == pytest.approx(more)
    assert scaled.weights == predicted.weights


def test_figures_of_a_node_replace_the_data_sheet() -> None:
    figures = {"gemm_float32_flops": 2e11, "memory_bytes_per_s": 1.5e10, "all_reduce_bytes_per_s": 1e9}
    found = with_figures(cpu_device(2), figures)
    assert (found.fp32_tflops, found.bandwidth, found.network, found.matmul_efficiency) == (0.2, 1.5e10, 1e9, 1.0)
