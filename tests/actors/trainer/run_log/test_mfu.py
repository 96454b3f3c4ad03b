"""A step's line has its time, its work and its device."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytide.actors.models.architecture import Architecture, model_shape
from raytide.actors.models.families import architecture_of
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.run_log import mfu
from raytide.actors.trainer.run_log.step_timer import StepTimer
from raytide.core.specs.train import TrainSpec
from raytide.sizing.devices import DEVICES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def arch_of(**changes: Any) -> Architecture:
    return architecture_of({**LLAMA, **changes}, "a test's model")


def test_llama_8b_at_the_speed_torchtitan_published_has_the_mfu_it_published() -> None:
    """5,762 tokens/s per H100 at 8192 tokens are 33.7 % of 989 TFLOP/s."""
    flops = mfu.flops_per_token(arch_of(), 8192) * 5762
    assert flops / 1e12 == pytest.approx(333.7, abs=0.3)
    assert flops / 1e12 / DEVICES["H100"].bf16_tflops == pytest.approx(0.337, abs=0.001)


def test_a_layer_with_a_window_computes_the_pairs_in_its_window() -> None:
    small = {**SMALL, "num_key_value_heads": 2, "architectures": ["MistralForCausalLM"]}
    whole, windowed = (arch_of(**small, sliding_window=window) for window in (None, 64))
    seen = sum(min(at, 64) for at in range(1, 257)) / 256  # of 256 tokens, by the mean token
    matrices = 6 * mfu.matrix_parameters(whole)
    assert mfu.flops_per_token(windowed, 256) - matrices == pytest.approx(12 * 2 * 32 * 2 * seen, rel=0.01)
    assert mfu.flops_per_token(windowed, 64) == mfu.flops_per_token(whole, 64)
    for length in (64, 256):  # the planner counts the same
        assert model_shape(windowed).flops_per_token(length) == mfu.flops_per_token(windowed, length)


@pytest.mark.parametrize("tied", [False, True])
def test_the_counted_weights_are_the_matrices_of_the_model_without_its_embedding(tied: bool) -> None:
    arch = arch_of(**SMALL, num_key_value_heads=2, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = Transformer(arch, 16)
    matrices = {name: weight.numel() for name, weight in model.named_parameters() if weight.ndim > 1}
    left_out = 0 if tied else matrices["embedding.weight"]
    assert mfu.matrix_parameters(arch) == sum(matrices.values()) - left_out


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("", "bf16", None),
    ],
)
def test_a_device_that_is_not_known_has_no_peak(name: str, precision: str, peak: float | None) -> None:
    assert mfu.peak_tflops(name, precision) == peak


def test_the_memory_of_a_gpu_is_that_since_the_gang_formed_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"cuda:0": 80}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update({str(device): 30}))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[str(device)])
    spec = TrainSpec(name="small", dataset="none", out="none", steps=1)
    gpu, cpu = (
        mfu.MfuMeter(spec, arch_of(), SimpleNamespace(device=torch.device(name), world=1))  # type: ignore[arg-type]
        for name in ("cuda:0", "cpu")
    )
    assert (gpu.gpu_bytes(), gpu.memory_bytes(), cpu.gpu_bytes()) == (30, 30, 0)
    assert cpu.memory_bytes() > 1 << 20


def test_laps_of_one_phase_add_up_and_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 8.0, 9.0])
    monkeypatch.setattr("raytide.actors.trainer.run_log.step_timer.time.perf_counter", lambda: next(now))
    clock = StepTimer(torch.device("cpu"))
    clock.start()
    clock.lap("data")
    clock.lap("optimizer")
    clock.lap("data")
    assert clock.drain_times() == {"data": 6.0, "optimizer": 1.0}
    clock.lap("data")
    assert clock.drain_times() == {"data": 1.0}


@dataclass
class Device:
    """A stream of events: those up to `done` have happened, one a second."""

    done: int = -1
    events: list[Event] = field(default_factory=list)


@dataclass
class Event:
    device: Device
    at: int = -1

    def record(self) -> None:
        self.at = len(self.device.events)
        self.device.events.append(self)

    def query(self) -> bool:
        return self.at <= self.device.done

    def elapsed_time(self, other: Event) -> float:
        assert other.query(), "asking for the time of an event to come would wait for it"
        return 1e3 * (other.at - self.at)


def test_on_a_gpu_a_lap_that_still_runs_is_counted_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    clock = StepTimer(torch.device("cuda"))
    clock.start()
    for phase in ("forward_backward", "norm", "optimizer"):
        clock.lap(phase)
    device.done = len(device.events) - 2  # the loss was read before the optimizer's kernels ran
    assert clock.drain_times() == {"forward_backward": 1.0, "norm": 1.0}
    clock.start()
    clock.lap("forward_backward")
    device.done = len(device.events) - 1
    assert clock.drain_times() == {"optimizer": 1.0, "forward_backward": 1.0}
