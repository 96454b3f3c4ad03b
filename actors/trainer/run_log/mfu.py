"""Model FLOPs utilization (MFU) and memory of a step.

If the planner does not know the device, its peak is unknown, and a run has no MFU unless its spec sets `peak_tflops`.
"""

from __future__ import annotations

import resource

import torch

from raytide.actors.models.architecture import Architecture
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.core.specs.train import TrainSpec
from raytide.sizing.devices import find_device


class MfuMeter:
    """Measures MFU and memory of one run on one group."""

    def __init__(self, spec: TrainSpec, arch: Architecture, group: ProcessGroup) -> None:
        self.device = group.device
        self._arch, self._frozen = arch, spec.finetune is not None
        name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else ""
        peak = peak_tflops(name, spec.precision) if spec.peak_tflops is None else spec.peak_tflops
        self._peak = None if peak is None else peak * 1e12 * group.world

    def mfu(self, tokens: int, seconds: float, span: float) -> float | None:
        """Returns the share of all devices' peak that a step of `tokens` tokens in `seconds` used; None if the peak is
        unknown.

        `span` is the mean number of tokens over which attention runs: the sequence length without document masks. With
        document masks it is the mean, over tokens, of their documents' lengths, so that skipped pairs do not count as
        work.
        """
        if self._peak is None:
            return None
        return tokens * flops_per_token(self._arch, span, frozen=self._frozen) / (seconds * self._peak)

    def memory_bytes(self) -> int:
        """Returns this rank's peak memory in bytes: allocated on its GPU, or resident in its process without a GPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB


def flops_per_token(arch: Architecture, seq_len: float, *, frozen: bool = False) -> float:
    """Returns the FLOPs per token of forward and backward pass: 6N' + 12*L*d*T with full attention (PaLM, appendix B).

    N' excludes the embedding, includes the head, and counts only the experts that a token uses. Recomputed activations
    do not count: they are the hardware's work, not the model's. With adapters the frozen model has no weight gradients,
    so the first term is 4N'; the adapters' own work is negligible.
    """
    width = arch.num_heads * arch.head_dim
    return (4.0 if frozen else 6.0) * matrix_parameters(arch) + 12.0 * arch.num_layers * width * seq_len


def matrix_parameters(arch: Architecture) -> int:
    """Returns the number of weights by which each token is multiplied. Norms and biases are negligible."""
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
    """Returns the device's dense half-precision peak in TFLOP/s, as its vendor states it; None if unknown."""
    device = None if precision == "fp32" else find_device(device_name)
    return None if device is None else device.bf16_tflops
