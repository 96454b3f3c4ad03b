"""Training on repeated data: Muennighoff et al. 2023, "Scaling Data-Constrained Language Models" (arXiv 2305.16264)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raytide.sizing.scaling.laws import FLOPS_PER_PARAMETER, golden_section

LOG_A, LOG_B, LOG_E = 6.255414, 7.3049974, 0.6254804
EXPONENT = 0.3526596
"""Alpha and beta, which are equal in this fit."""
DATA_DECAY, SIZE_DECAY = 15.387756, 5.309743
"""R*_D and R*_N: the number of repetitions after which more of them add little."""
BALANCE = math.exp((LOG_A - LOG_B) / (2 * EXPONENT))
"""G of the fit, 0.225802: N = G (C / 6)^0.5."""


@dataclass(frozen=True, slots=True)
class RepeatedPlan:
    """A model size and a number of tokens, of which only some are unique."""

    parameters: float
    tokens: float
    unique_tokens: float
    loss: float

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique_tokens


def effective(total: float, unique: float, decay: float) -> float:
    """Returns U + U R* (1 - e^(-R / R*)) with R = total / U - 1 repetitions: the worth of `total` in unique units."""
    used = min(unique, total)
    repetitions = max(0.0, total / used - 1.0)
    return used + used * decay * (1.0 - math.exp(-repetitions / decay))


def optimal_parameters(tokens: float) -> float:
    """Returns the size that uses `tokens` unique tokens best, N = G^2 D, as alpha equals beta."""
    return BALANCE * BALANCE * tokens


def repeated_loss(parameters: float, tokens: float, unique_tokens: float) -> float:
    """Returns the loss in nats a token of a model trained on `tokens` of which `unique_tokens` are different."""
    worth_tokens = effective(tokens, unique_tokens, DATA_DECAY)
    base = min(optimal_parameters(min(unique_tokens, tokens)), parameters)
    worth_parameters = effective(parameters, base, SIZE_DECAY)
    a, b, e = math.exp(LOG_A), math.exp(LOG_B), math.exp(LOG_E)
    return float(e + a / worth_parameters**EXPONENT + b / worth_tokens**EXPONENT)


def repeated_optimum(flops: float, unique_tokens: float) -> RepeatedPlan:
    """Returns the best allocation of `flops` when only `unique_tokens` exist, by a golden-section search over
    model sizes.

    Sizes run from a hundredth to a hundred times the optimum of unlimited data.
    """
    middle = math.log(BALANCE * math.sqrt(flops / FLOPS_PER_PARAMETER))

    def loss(log_parameters: float) -> float:
        parameters = math.exp(log_parameters)
        return repeated_loss(parameters, flops / FLOPS_PER_PARAMETER / parameters, unique_tokens)

    parameters = math.exp(golden_section(loss, middle - math.log(100.0), middle + math.log(100.0)))
    tokens = flops / FLOPS_PER_PARAMETER / parameters
    return RepeatedPlan(parameters, tokens, min(unique_tokens, tokens), loss(math.log(parameters)))
