"""Published memory formulas of other trainers, against which the planner is tested and with which users compare.

Symbols as in the papers: L layers, h width, a heads, s sequence length, b micro-batch, t tensor, p pipeline ranks, v
stages of each, N parameters, D data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A GPT of Korthikanti et al. 2022 (arXiv 2205.05198), table 3, with its parallel sizes."""

    width: int
    heads: int
    layers: int
    tensor: int
    pipeline: int
    micro_batch: int
    stages: int
    seq_len: int = 2048

    @property
    def state_bytes(self) -> float:
        """18 bytes a weight (bf16 weights, fp32 gradients, Adam) of 12 L h^2, over t p ranks."""
        return 18 * 12 * self.layers * self.width**2 / (self.tensor * self.pipeline)

    def activation_bytes(self, *, sequence_parallel: bool, recompute: Recompute) -> float:
        """Returns the activations of the first stage: all L layers, as p micro-batches are in flight, with the
        interleaved schedule's 1 + (p-1) / (p v)."""
        layer = korthikanti_layer_bytes(
            self.seq_len,
            self.micro_batch,
            self.width,
            self.heads,
            tensor=self.tensor,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
        )
        interleaved = 1.0 if self.stages == 1 else 1.0 + (self.pipeline - 1) / (self.pipeline * self.stages)
        return self.layers * layer * interleaved


def korthikanti_layer_bytes(
    seq_len: int,
    micro_batch: int,
    width: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Returns the activations of a GPT layer at 16 bits with dropout (arXiv 2205.05198, table 2).

    Whole: sbh (34 + 5as/h). Tensor-parallel: sbh (10 + 24/t + 5as/(ht)). With sequence parallelism everything is
    divided by t. Selective recomputation, as FlashAttention, drops the term of the scores; full keeps 2 sbh.
    """
    sbh = seq_len * micro_batch * width
    if recompute == "full":
        return 2.0 * sbh
    scores = 0.0 if recompute == "selective" else 5.0 * heads * seq_len / width / tensor
    fixed = 34.0 / tensor if sequence_parallel else 10.0 + 24.0 / tensor
    return sbh * (fixed + scores)


def zero_state_bytes(parameters: float, ranks: int, stage: Literal[0, 1, 2, 3]) -> float:
    """Returns the model state of one rank by Rajbhandari et al. 2020 (arXiv 1910.02054): 2 + 2 + 12 bytes a parameter,
    of which the stages divide 12, 14 and 16."""
    divided = {0: 0.0, 1: 12.0, 2: 14.0, 3: 16.0}[stage]
    return parameters * (16.0 - divided + divided / ranks)


def deepspeed_state_bytes(parameters: float, largest_layer: float, ranks: int, stage: Literal[2, 3]) -> float:
    """Returns what DeepSpeed's `estimate_zero*_model_states_mem_needs` print for a GPU without offloading: ZeRO-2 has
    2 N + 18 N / D, ZeRO-3 18 N / D and four bytes for each parameter of its largest layer."""
    divided = 18.0 * parameters / ranks
    return 2.0 * parameters + divided if stage == 2 else divided + 4.0 * largest_layer


def megatron_state_bytes(parameters: float, ranks: int, precision: Literal["bf16", "fp16", "fp32"]) -> float:
    """Returns the state of a rank with Megatron-LM's distributed optimizer: bf16 6 + 12/D, fp16 4 + 16/D, fp32
    8 + 8/D bytes a parameter (docs of its dist_optimizer)."""
    kept, divided = {"bf16": (6.0, 12.0), "fp16": (4.0, 16.0), "fp32": (8.0, 8.0)}[precision]
    return parameters * (kept + divided / ranks)
