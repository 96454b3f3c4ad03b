"""Fits a scaling law to measured losses, as Besiroglu et al. 2024 (arXiv 2404.10102) refit Hoffmann's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from raytide.sizing.scaling.laws import ScalingLaw

HUBER_DELTA = 1e-3
"""The error of the log loss above which the Huber loss is linear."""
LOSS_SCALE = 1e3
"""The objective is multiplied by it, since L-BFGS otherwise stops at its tolerance before the minimum: the error of
Hoffmann's approach 3."""
STARTS = tuple(product((0.0, 15.0), (0.0, 15.0), (0.3, 0.8)))
"""Initial values of log A, log B and both exponents."""
_RESTARTS = 50
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LawFit:
    """A fitted law, its objective (unscaled), and the objectives that the starts reached."""

    law: ScalingLaw
    objective: float
    objectives: tuple[float, ...]


def fit_law(
    parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float], name: str = "fitted"
) -> LawFit:
    """Returns the law that minimises the summed Huber loss of log loss over all points; the best of all starts.

    Raises ValueError for fewer than five points, which cannot determine five constants.
    """
    from scipy.optimize import minimize

    if len(losses) < 5 or not len(losses) == len(parameters) == len(tokens):
        raise ValueError(f"{len(losses)} losses cannot determine five constants")
    log_n, log_d, log_l = (np.log(np.asarray(each, dtype=np.float64)) for each in (parameters, tokens, losses))
    found = []
    for log_a, log_b, exponent in STARTS:
        start = np.array([log_a, log_b, 0.0, exponent, exponent])
        options = {"maxiter": 10_000, "maxfun": 100_000, "ftol": 1e-15, "gtol": 1e-10}
        best = minimize(_objective, start, args=(log_n, log_d, log_l), jac=True, method="L-BFGS-B", options=options)
        for _ in range(_RESTARTS):  # its line search gives up at a kink of the Huber loss; a fresh one goes on
            again = minimize(
                _objective, best.x, args=(log_n, log_d, log_l), jac=True, method="L-BFGS-B", options=options
            )
            if again.fun >= best.fun * (1 - 1e-12):
                break
            best = again
        found.append(best)
    best = min(found, key=lambda each: float(each.fun))
    log_a, log_b, log_e, alpha, beta = (float(value) for value in best.x)
    law = ScalingLaw(name, float(np.exp(log_e)), float(np.exp(log_a)), float(np.exp(log_b)), alpha, beta)
    return LawFit(law, float(best.fun) / LOSS_SCALE, tuple(float(each.fun) / LOSS_SCALE for each in found))


def _objective(x: _Floats, log_n: _Floats, log_d: _Floats, log_l: _Floats) -> tuple[float, _Floats]:
    """Returns the scaled objective and its gradient in (log A, log B, log E, alpha, beta)."""
    log_a, log_b, log_e, alpha, beta = x
    parts = np.stack([log_a - alpha * log_n, log_b - beta * log_d, np.full_like(log_n, log_e)])
    highest = parts.max(axis=0)
    predicted = highest + np.log(np.exp(parts - highest).sum(axis=0))
    error = predicted - log_l
    small = np.abs(error) <= HUBER_DELTA
    huber = np.where(small, 0.5 * error**2, HUBER_DELTA * (np.abs(error) - 0.5 * HUBER_DELTA))
    slope = np.where(small, error, HUBER_DELTA * np.sign(error))
    share = np.exp(parts - predicted) * slope
    of_alpha, of_beta = -(share[0] * log_n).sum(), -(share[1] * log_d).sum()
    gradient = np.array([share[0].sum(), share[1].sum(), share[2].sum(), of_alpha, of_beta])
    return float(LOSS_SCALE * huber.sum()), LOSS_SCALE * gradient
