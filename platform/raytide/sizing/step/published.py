"""Published formulas of training time and utilization, against which the planner is tested.

L layers, h width, s sequence length, V vocabulary, N parameters, T tokens, n devices, X achieved FLOP/s of one.
"""

from __future__ import annotations

DAY_S = 86_400.0


def megatron_parameters(layers: int, width: int, seq_len: int = 2048, vocab: int = 51_200) -> float:
    """Returns 12 L h^2 (1 + 13/(12h) + (V+s)/(12 L h)), Narayanan et al. 2021 (arXiv 2104.04473), equation 2."""
    return 12.0 * layers * width**2 * (1.0 + 13.0 / (12.0 * width) + (vocab + seq_len) / (12.0 * layers * width))


def megatron_flops_per_token(layers: int, width: int, seq_len: int = 2048, vocab: int = 51_200) -> float:
    """Returns 96 L h^2 (1 + s/(6h) + V/(16 L h)), which includes a whole recomputation (2104.04473, equation 3)."""
    return 96.0 * layers * width**2 * (1.0 + seq_len / (6.0 * width) + vocab / (16.0 * layers * width))


def megatron_days(tokens: float, flops_per_token: float, devices: int, achieved_tflops: float) -> float:
    return tokens * flops_per_token / (devices * achieved_tflops * 1e12) / DAY_S


def narayanan_days(parameters: float, tokens: float, devices: int, achieved_tflops: float) -> float:
    """Returns 8 T N / (n X) in days, with a whole recomputation (2104.04473, equation 4)."""
    return 8.0 * parameters * tokens / (devices * achieved_tflops * 1e12) / DAY_S


def korthikanti_model_flops(layers: int, width: int, batch: int, seq_len: int = 2048, vocab: int = 51_200) -> float:
    """Returns a step's model FLOPs, 72 B L s h^2 (1 + s/(6h) + V/(12 L h)) (arXiv 2205.05198, appendix A)."""
    return (
        72.0 * batch * layers * seq_len * width**2
        * (1.0 + seq_len / (6.0 * width) + vocab / (12.0 * layers * width))
    )  # fmt: skip


def palm_mfu(
    tokens_per_s: float,
    devices: int,
    peak_tflops: float,
    parameters: float,
    *,
    layers: int = 0,
    attention_width: int = 0,
    seq_len: int = 0,
) -> float:
    """Returns tokens/s (6 N + 12 L H Q T) / (n peak), PaLM (arXiv 2204.02311), appendix B; without sizes of attention,
    6 N alone."""
    flops = 6.0 * parameters + 12.0 * layers * attention_width * seq_len
    return tokens_per_s * flops / (devices * peak_tflops * 1e12)
