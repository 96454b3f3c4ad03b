"""Over-training for inference: Sardana et al. 2023, "Beyond Chinchilla-Optimal" (arXiv 2401.00448).

A smaller model trained on more tokens reaches the same loss and is cheaper to serve.
"""

from __future__ import annotations

import math

from raytide.sizing.scaling.laws import BESIROGLU, FLOPS_PER_PARAMETER, Allocation, ScalingLaw

_SERVED = 2.0
"""FLOPs of one parameter and token in a forward pass."""
_PRECISION = 1e-9


def cheapest_for_loss(loss: float, served_tokens: float, law: ScalingLaw = BESIROGLU) -> Allocation:
    """Returns the model with this loss whose training and serving need the fewest FLOPs together.

    Raises ValueError if the law never reaches the loss. The cost, 6 N D + 2 N D_inf, is convex in log N, so a
    golden-section search finds its minimum.
    """
    if loss <= law.irreducible:
        raise ValueError(f"a loss of {loss} is not above the irreducible {law.irreducible} of {law.name}")
    smallest = (law.parameter_factor / (loss - law.irreducible)) ** (1.0 / law.parameter_exponent)

    def cost(excess: float) -> float:
        parameters = smallest * (1.0 + math.exp(excess))
        tokens = law.tokens_for(parameters, loss)
        return math.log(parameters) + math.log(FLOPS_PER_PARAMETER * tokens + _SERVED * served_tokens)

    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    low, high = math.log(1e-6), math.log(1e6)
    while high - low > _PRECISION:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if cost(left) < cost(right) else (left, high)
    parameters = smallest * (1.0 + math.exp((low + high) / 2))
    return law.allocation(parameters, law.tokens_for(parameters, loss))


def over_trained(flops: float, served_tokens: float, law: ScalingLaw = BESIROGLU) -> Allocation:
    """Returns the cheapest model over its life that is as good as the compute-optimal one of `flops`."""
    return cheapest_for_loss(law.optimum(flops).loss, served_tokens, law)
