"""What a step cost and what it could have: model FLOPs, the device's peak, and memory.

A device that is not in the table has no peak and a run on it no MFU, unless the spec says `peak_tflops`.
"""

from __future__ import annotations

import re
import resource

import torch

from raytide.actors.models.architecture import Architecture
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.core.specs.train import TrainSpec

PEAK_TFLOPS: dict[str, float] = {
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H100": 989.4,
    "H800": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.05,
    "L4": 121.0,
    "MI300X": 1307.4,
    "MI250X": 383.0,
}
"""Dense bf16 or fp16 by part of the device's name, from the makers' data sheets; the first that fits holds."""


class MfuMeter:
    """Of one run on one group."""

    def __init__(self, spec: TrainSpec, arch: Architecture, group: ProcessGroup) -> None:
        self.device = group.device
        self.flops_per_token = flops_per_token(arch, spec.seq_len, frozen=spec.finetune is not None)
        name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else ""
        peak = peak_tflops(name, spec.precision) if spec.peak_tflops is None else spec.peak_tflops
        self._peak = None if peak is None else peak * 1e12 * group.world

    def mfu(self, tokens: int, seconds: float) -> float | None:
        """The share of what all devices could have computed in `seconds`; None when their peak is not known."""
        return None if self._peak is None else tokens * self.flops_per_token / (seconds * self._peak)

    def memory_bytes(self) -> int:
        """The most that this rank has had so far: of its GPU, as torch gave it out, else of the process's own."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def flops_per_token(arch: Architecture, seq_len: int, *, frozen: bool = False) -> float:
    """Forward and backward: 6N' + 12*L*d*T, full attention, as is the convention (PaLM, appendix B).

    N' leaves the embedding out, but not the head, and of experts counts those that a token meets. Recomputed
    activations do not count: they are the hardware's work, not the model's. A frozen model, which only adapters learn
    for, has no gradients of its weights: 4N'; the adapters' own work is too little to count.
    """
    width = arch.num_heads * arch.head_dim
    return (4.0 if frozen else 6.0) * matrix_parameters(arch) + 12.0 * arch.num_layers * width * seq_len


def matrix_parameters(arch: Architecture) -> int:
    """Weights that a token is multiplied with; norms and biases are too few to count."""
    d = arch.hidden_size
    attention = 2 * d * arch.head_dim * (arch.num_heads + arch.num_kv_heads)
    matrices = 3 if arch.gated_ffn else 2
    total = arch.vocab_size * d
    for layer in arch.layers:
        total += attention
        if layer.sparse and arch.experts is not None:
            total += d * arch.experts.count + arch.experts.per_token * 3 * d * arch.experts.ffn_size
        else:
            total += matrices * d * arch.ffn_size
    return total


def peak_tflops(device_name: str, precision: str) -> float | None:
    """By the table, for half precision; None for what it does not know."""
    if precision == "fp32":
        return None
    return next((peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", device_name)), None)
