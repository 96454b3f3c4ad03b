"""The model FLOPs utilization (MFU) and the memory use of a step.

If the planner does not know the device, the device's peak is unknown. Then a run has no MFU, unless its spec sets
`peak_tflops`.
"""

from __future__ import annotations

import resource

import torch

from raytide.actors.models.architecture import Architecture
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.core.specs.train import TrainSpec
from raytide.sizing.devices import find_device
from raytide.sizing.model_shape import windowed_span


class MfuMeter:
    """Measures the MFU and the memory use of one run on one process group."""

    def __init__(self, spec: TrainSpec, arch: Architecture, group: ProcessGroup) -> None:
        self.device = group.device
        self._arch, self._frozen = arch, spec.finetune is not None
        name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else ""
        peak = peak_tflops(name, spec.precision) if spec.peak_tflops is None else spec.peak_tflops
        self._peak = None if peak is None else peak * 1e12 * group.world
        if group.device.type == "cuda":  # the process may have been in another gang, with other shards
            torch.cuda.reset_peak_memory_stats(group.device)

    def mfu(self, tokens: int, seconds: float, span: float) -> float | None:
        """Returns the fraction of all devices' peak FLOPs that a step used. Returns None if the peak is unknown. The
        step computed `tokens` tokens and took `seconds`. Tokens of prompts count, although nothing is learnt from
        them.

        `span` is the mean number of tokens over which attention runs. Without document masks, `span` is the sequence
        length. With document masks, a token counts with the length of its document, and `span` is the mean over all
        tokens. Pairs of tokens that attention skips therefore do not count as work.
        """
        if self._peak is None:
            return None
        return tokens * flops_per_token(self._arch, span, frozen=self._frozen) / (seconds * self._peak)

    def gpu_bytes(self) -> int:
        """Returns the peak number of bytes allocated on this rank's GPU since the meter was made; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def memory_bytes(self) -> int:
        """Returns this rank's peak memory in bytes: `gpu_bytes`, or on a CPU the resident memory of the process."""
        if self.device.type == "cuda":
            return self.gpu_bytes()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB


def flops_per_token(arch: Architecture, seq_len: float, *, frozen: bool = False) -> float:
    """Returns the FLOPs per token of the forward and backward pass: 6N' + 12*L*d*T with full attention (PaLM, appendix
    B).

    N' is the number of weights without the embedding, with the head, and with only those experts that a token uses. L
    is the number of layers, d the width of all heads, and T the sequence length. Recomputed activations do not count:
    they are work of the hardware, not of the model. If the weights are `frozen` and adapters are trained, no gradients
    of the model's weights are computed, and the first term is 4N'. The adapters' own work is negligible.

    In a layer with a sliding window, T is that of `windowed_span`.
    """
    width = arch.num_heads * arch.head_dim
    spans = sum(windowed_span(seq_len, layer.window) for layer in arch.layers)
    return (4.0 if frozen else 6.0) * matrix_parameters(arch) + 12.0 * width * spans


def matrix_parameters(arch: Architecture) -> int:
    """Returns the number of weights by which each token is multiplied. Norms and biases are left out as negligible."""
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
    """Returns the device's dense half-precision peak in TFLOP/s, as the vendor states it. Returns None if it is
    unknown.
    """
    device = None if precision == "fp32" else find_device(device_name)
    return None if device is None else device.bf16_tflops
