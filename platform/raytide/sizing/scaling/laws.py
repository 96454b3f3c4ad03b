"""Scaling laws of the loss. For a number of FLOPs, they predict the model size and the number of tokens with the lowest
loss.

The law is equation 2 of Hoffmann et al. 2022 (arXiv 2203.15556): L(N, D) = E + A / N^alpha + B / D^beta, with C = 6
N D. N is the number of parameters, D the number of tokens, and C the FLOPs. Over-training for inference follows
Sardana et al. 2023, "Beyond Chinchilla-Optimal" (arXiv 2401.00448): a smaller model trained on more tokens reaches
the same loss and is cheaper to serve. Training on repeated data follows Muennighoff et al. 2023, "Scaling
Data-Constrained Language Models" (arXiv 2305.16264).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

FLOPS_PER_PARAMETER = 6.0
"""The forward and backward FLOPs of one parameter and token (Kaplan et al. 2020)."""
_SERVED = 2.0
"""The FLOPs of one parameter and token in a forward pass."""
_PRECISION = 1e-9
LOG_A, LOG_B, LOG_E = 6.255414, 7.3049974, 0.6254804
EXPONENT = 0.3526596
"""The exponents alpha and beta, which are equal in this fit."""
DATA_DECAY, SIZE_DECAY = 15.387756, 5.309743
"""R*_D and R*_N: the numbers of repetitions after which further repetitions add little."""
BALANCE = math.exp((LOG_A - LOG_B) / (2 * EXPONENT))
"""The constant G of the fit, 0.225802: N = G (C / 6)^0.5."""


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """The constants of one fit of the scaling law. Losses are in nats a token."""

    name: str
    irreducible: float
    """E, the loss of an ideal model."""
    parameter_factor: float
    data_factor: float
    parameter_exponent: float
    data_exponent: float
    errors: tuple[float, float, float, float, float] | None = None
    """The standard errors of the constants, in the order of the fields."""

    def loss(self, parameters: float, tokens: float) -> float:
        of_size = self.parameter_factor / parameters**self.parameter_exponent
        return float(self.irreducible + of_size + self.data_factor / tokens**self.data_exponent)

    @property
    def size_exponent(self) -> float:
        """The exponent with which the optimal number of parameters grows with the FLOPs C: beta / (alpha + beta)."""
        return self.data_exponent / (self.parameter_exponent + self.data_exponent)

    @property
    def balance(self) -> float:
        """The constant G in Hoffmann's equation 4: (alpha A / (beta B))^(1 / (alpha + beta))."""
        numerator = self.parameter_exponent * self.parameter_factor
        power = 1.0 / (self.parameter_exponent + self.data_exponent)
        return float((numerator / (self.data_exponent * self.data_factor)) ** power)

    def optimum(self, flops: float) -> Allocation:
        """Returns the model size and the number of tokens with the lowest loss for `flops`, in closed form."""
        parameters = self.balance * (flops / FLOPS_PER_PARAMETER) ** self.size_exponent
        return self.allocation(parameters, flops / FLOPS_PER_PARAMETER / parameters)

    def allocation(self, parameters: float, tokens: float) -> Allocation:
        return Allocation(parameters, tokens, self.loss(parameters, tokens))

    def tokens_for(self, parameters: float, loss: float) -> float:
        """Returns the number of tokens after which a model of this size reaches the loss. Returns infinity if the model
        never reaches the loss.
        """
        rest = loss - self.irreducible - self.parameter_factor / parameters**self.parameter_exponent
        return float((self.data_factor / rest) ** (1.0 / self.data_exponent)) if rest > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Allocation:
    """A model size and a number of tokens, with the loss that the law predicts."""

    parameters: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens


HOFFMANN = ScalingLaw("Hoffmann 2022, approach 3 as printed", 1.69, 406.4, 410.7, 0.34, 0.28)
"""The law with Hoffmann's printed constants. They are rounded, which biases the optimum towards small models (Besiroglu
et al. 2024).
"""
BESIROGLU = ScalingLaw(
    "Besiroglu 2024", 1.8172, 482.01, 2085.43, 0.3478, 0.3658, errors=(0.026, 125.0, 1293.0, 0.015, 0.021)
)
"""The refit of Hoffmann's data (arXiv 2404.10102), which is the default."""

APPROACH_1 = (
    (0.4e9, 8.0e9, 1.92e19),
    (1e9, 20.2e9, 1.21e20),
    (10e9, 205.1e9, 1.23e22),
    (67e9, 1.5e12, 5.76e23),
    (175e9, 3.7e12, 3.85e24),
    (280e9, 5.9e12, 9.90e24),
)
"""The parameters, tokens and FLOPs in Hoffmann's table 3, which are the minima over training curves."""


def approach_1(flops: float) -> tuple[float, float]:
    """Returns the parameters and tokens for `flops` according to Hoffmann's approach 1.

    They are interpolated logarithmically between the rows of Hoffmann's table, and extrapolated outside of it.
    """
    rows = APPROACH_1
    upper = next((at for at, row in enumerate(rows) if row[2] >= flops), len(rows) - 1)
    low, high = rows[max(0, upper - 1)], rows[max(1, upper)]
    share = math.log(flops / low[2]) / math.log(high[2] / low[2])
    parameters, tokens = (low[at] * (high[at] / low[at]) ** share for at in (0, 1))
    return parameters, tokens


def approach_2(flops: float) -> tuple[float, float]:
    """Returns the parameters and tokens for `flops` according to Hoffmann's approach 2 (isoFLOP profiles).

    N grows as C^0.49 and D as C^0.51. The curve passes through Chinchilla's own budget: 67e9 parameters at 5.76e23
    FLOPs.
    """
    parameters = 67e9 * (flops / 5.76e23) ** 0.49
    return parameters, flops / FLOPS_PER_PARAMETER / parameters


def golden_section(cost: Callable[[float], float], low: float, high: float) -> float:
    """Returns the position of the minimum of `cost` between `low` and `high`, to within 1e-9. `cost` must have a single
    minimum in this interval.
    """
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    while high - low > _PRECISION:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if cost(left) < cost(right) else (left, high)
    return (low + high) / 2


def cheapest_for_loss(loss: float, served_tokens: float, law: ScalingLaw = BESIROGLU) -> Allocation:
    """Returns the model size and number of tokens that reach this loss with the fewest FLOPs. Both training and serving
    count.

    These FLOPs are 6 N D + 2 N D_inf, where D_inf is `served_tokens`. They are convex in log N, so a golden-section
    search finds the minimum. Raises ValueError if the law never reaches the loss.
    """
    if loss <= law.irreducible:
        raise ValueError(f"a loss of {loss} is not above the irreducible {law.irreducible} of {law.name}")
    smallest = (law.parameter_factor / (loss - law.irreducible)) ** (1.0 / law.parameter_exponent)

    def cost(excess: float) -> float:
        parameters = smallest * (1.0 + math.exp(excess))
        tokens = law.tokens_for(parameters, loss)
        return math.log(parameters) + math.log(FLOPS_PER_PARAMETER * tokens + _SERVED * served_tokens)

    parameters = smallest * (1.0 + math.exp(golden_section(cost, math.log(1e-6), math.log(1e6))))
    return law.allocation(parameters, law.tokens_for(parameters, loss))


def over_trained(flops: float, served_tokens: float, law: ScalingLaw = BESIROGLU) -> Allocation:
    """Returns the cheapest model that reaches a certain loss: the loss of the compute-optimal model for `flops`. The
    cost is the number of FLOPs for training the model and for serving `served_tokens` tokens.
    """
    return cheapest_for_loss(law.optimum(flops).loss, served_tokens, law)


@dataclass(frozen=True, slots=True)
class RepeatedPlan:
    """A model size and a number of training tokens. Only `unique_tokens` of the tokens are unique, and the rest are
    repeats.
    """

    parameters: float
    tokens: float
    unique_tokens: float
    loss: float

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique_tokens


def effective(total: float, unique: float, decay: float) -> float:
    """Returns the number of unique units that are worth as much as `total` units with repeats.

    It is U + U R* (1 - e^(-R / R*)), where U is `unique`, R* is `decay`, and R = total / U - 1 is the number of
    repetitions.
    """
    used = min(unique, total)
    repetitions = max(0.0, total / used - 1.0)
    return used + used * decay * (1.0 - math.exp(-repetitions / decay))


def optimal_parameters(tokens: float) -> float:
    """Returns the optimal number of parameters N for D unique tokens: N = G^2 D. The formula is this simple because
    alpha equals beta.
    """
    return BALANCE * BALANCE * tokens


def repeated_loss(parameters: float, tokens: float, unique_tokens: float) -> float:
    """Returns the loss, in nats per token, of a model trained on `tokens` tokens, of which `unique_tokens` are
    unique.
    """
    worth_tokens = effective(tokens, unique_tokens, DATA_DECAY)
    base = min(optimal_parameters(min(unique_tokens, tokens)), parameters)
    worth_parameters = effective(parameters, base, SIZE_DECAY)
    a, b, e = math.exp(LOG_A), math.exp(LOG_B), math.exp(LOG_E)
    return float(e + a / worth_parameters**EXPONENT + b / worth_tokens**EXPONENT)


def repeated_optimum(flops: float, unique_tokens: float) -> RepeatedPlan:
    """Returns the best use of `flops` if only `unique_tokens` training tokens exist. It is found by a golden-section
    search over model sizes.

    The search covers sizes from a hundredth to a hundred times the optimum for unlimited data.
    """
    middle = math.log(BALANCE * math.sqrt(flops / FLOPS_PER_PARAMETER))

    def loss(log_parameters: float) -> float:
        parameters = math.exp(log_parameters)
        return repeated_loss(parameters, flops / FLOPS_PER_PARAMETER / parameters, unique_tokens)

    parameters = math.exp(golden_section(loss, middle - math.log(100.0), middle + math.log(100.0)))
    tokens = flops / FLOPS_PER_PARAMETER / parameters
    return RepeatedPlan(parameters, tokens, min(unique_tokens, tokens), loss(math.log(parameters)))
