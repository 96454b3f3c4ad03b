"""A sequential test of two shares, such as shares of failed requests. It stays valid however often its result is read.

The test multiplies E-variables, one for each block of observations (Turner, Ly, Grunwald: Generic E-variables for exact
sequential k-sample tests that allow for optional stopping, 2021). A block has n_a and n_b observations. The alternative
assumes the shares theta_a < theta_b. The null hypothesis assumes the same share for both:

    theta_0 = (n_a theta_a + n_b theta_b) / (n_a + n_b).

The E-variable is the likelihood ratio of the alternative to the null hypothesis. Its expectation is at most 1 if b is
no worse than a. By Ville's inequality, the probability that the product ever reaches 1 / alpha is then at most alpha,
for any traffic split, even a changing one. Observations must be independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

ODDS_RATIOS = (1.5, 3.0, 10.0, 100.0)
"""The odds ratios (b's odds over a's) of the alternatives, whose E-values are averaged."""
_PRIOR_BAD, _PRIOR_TOTAL = 0.5, 50.0
_LEAST, _MOST = 1e-4, 1 - 1e-4


@dataclass(frozen=True, slots=True)
class BadShare:
    """A number of observations, and the number of bad ones among them."""

    total: int = 0
    bad: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.bad <= self.total:
            raise ValueError(f"{self.bad} of {self.total} is no share")

    def plus(self, other: BadShare) -> BadShare:
        return BadShare(self.total + other.total, self.bad + other.bad)

    @property
    def mean(self) -> float:
        return self.bad / self.total if self.total else 0.0

    def lower(self, alpha: float) -> float:
        """Returns the lower limit of Wilson's one-sided interval for the true share."""
        return 1.0 - BadShare(self.total, self.total - self.bad).upper(alpha)

    def upper(self, alpha: float) -> float:
        """Returns the upper limit of Wilson's one-sided interval of the true share. The true share exceeds this limit
        with a probability of about alpha.
        """
        if not self.total:
            return 1.0
        z2, n, mean = NormalDist().inv_cdf(alpha) ** 2, self.total, self.mean  # 1 - alpha may round to 1
        high = mean + z2 / (2 * n) + math.sqrt(z2 * (mean * (1 - mean) / n + z2 / (4 * n * n)))
        return min(1.0, high / (1 + z2 / n))


@dataclass(frozen=True, slots=True)
class ShareTest:
    """A sequential test of whether b's share of bad observations is higher than a's, with the evidence so far."""

    a: BadShare = BadShare()
    b: BadShare = BadShare()
    log_e: tuple[float, ...] = (0.0,) * len(ODDS_RATIOS)

    def updated(self, a: BadShare, b: BadShare) -> ShareTest:
        """Returns the test after a block of new observations of a and b. A block carries no evidence if it lacks
        observations of a or of b.
        """
        theta_a = _within((self.a.bad + _PRIOR_BAD) / (self.a.total + _PRIOR_TOTAL))
        logs = (
            log + _block(a, b, theta_a, _shifted(theta_a, odds))
            for log, odds in zip(self.log_e, ODDS_RATIOS, strict=True)
        )
        return ShareTest(self.a.plus(a), self.b.plus(b), tuple(logs))

    def against(self, limit: float, b: BadShare) -> ShareTest:
        """Returns the test after new observations of b, without new observations of a. Compares b's observations with
        `limit`, a share that is known to be good enough.
        """
        limit = _within(limit)
        logs = (
            log + _likelihood_ratio(b, _shifted(limit, odds), limit)
            for log, odds in zip(self.log_e, ODDS_RATIOS, strict=True)
        )
        return ShareTest(self.a, self.b.plus(b), tuple(logs))

    @property
    def e_value(self) -> float:
        """The evidence that b is worse than a. If b is not worse, the evidence exceeds 1 / alpha with a probability of
        at most alpha.
        """
        highest = max(self.log_e)
        if highest > 700.0:
            return math.inf
        return sum(math.exp(log) for log in self.log_e) / len(self.log_e)

    @property
    def excess(self) -> float:
        """b's share of bad observations minus a's share."""
        return self.b.mean - self.a.mean


def _block(a: BadShare, b: BadShare, theta_a: float, theta_b: float) -> float:
    if not a.total or not b.total:
        return 0.0
    theta_0 = (a.total * theta_a + b.total * theta_b) / (a.total + b.total)
    return _likelihood_ratio(a, theta_a, theta_0) + _likelihood_ratio(b, theta_b, theta_0)


def _likelihood_ratio(seen: BadShare, theta: float, null: float) -> float:
    """Returns the logarithm of the likelihood ratio of `theta` to `null`."""
    good = seen.total - seen.bad
    return seen.bad * math.log(theta / null) + good * math.log((1.0 - theta) / (1.0 - null))


def _shifted(theta: float, odds_ratio: float) -> float:
    odds = theta / (1.0 - theta) * odds_ratio
    return min(odds / (1.0 + odds), 1.0 - 1e-6)


def _within(theta: float) -> float:
    return min(max(theta, _LEAST), _MOST)
