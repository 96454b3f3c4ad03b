"""Statistics that compare a model's predictions with those of its parent, summed window by window.

Shape suffixes: T predicted tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

_ROWS = 128
"""The number of rows whose distributions exist at once. Each distribution takes 4 bytes per vocabulary entry."""


@dataclass(frozen=True, slots=True)
class CorpusQuality:
    """The results on one corpus. Likelihoods and divergences are in nats per token.

    If there is no parent, the fields that compare with the parent are None. If the model is an endpoint, the fields
    that need whole distributions are None.
    """

    tokens: int
    nll: float
    perplexity: float
    parent_perplexity: float | None = None
    dnll: float | None = None
    """The mean difference of the negative log likelihood, model minus parent, token by token."""
    dnll_error: float | None = None
    """The standard error of `dnll`, with windows as clusters, since the tokens of one window are not independent."""
    kl: float | None = None
    kl_p99: float | None = None
    same_top1: float | None = None

    @property
    def ppl_change(self) -> float | None:
        return None if self.dnll is None else math.expm1(min(self.dnll, 700.0))


@dataclass(slots=True)
class QualitySums:
    """Adds up the statistics of windows. Divergences are kept for every token (4 bytes each), because a percentile
    needs all of them.
    """

    tokens: int = 0
    nll: float = 0.0
    parent_nll: float | None = None
    same: int | None = None
    windows: list[tuple[int, float]] = field(default_factory=list)
    """For each window, the number of its tokens, and the sum over them of the model's negative log likelihood minus
    the parent's.
    """
    divergences: list[Tensor] = field(default_factory=list)

    def add(self, nll_T: Tensor, parent_nll_T: Tensor | None = None) -> None:
        self.tokens += len(nll_T)
        self.nll += float(nll_T.double().sum())
        if parent_nll_T is not None:
            self.parent_nll = (self.parent_nll or 0.0) + float(parent_nll_T.double().sum())
            self.windows.append((len(nll_T), float((nll_T.double() - parent_nll_T.double()).sum())))

    def add_distributions(self, kl_T: Tensor, same_top1: int) -> None:
        self.divergences.append(kl_T)
        self.same = (self.same or 0) + same_top1

    def result(self) -> CorpusQuality:
        mean = self.nll / self.tokens
        if self.parent_nll is None:
            return CorpusQuality(self.tokens, mean, _exp(mean))
        parent = self.parent_nll / self.tokens
        kl_T = torch.cat(self.divergences).double() if self.divergences else None
        return CorpusQuality(
            tokens=self.tokens,
            nll=mean,
            perplexity=_exp(mean),
            parent_perplexity=_exp(parent),
            dnll=mean - parent,
            dnll_error=self._error(mean - parent),
            kl=None if kl_T is None else float(kl_T.mean()),
            kl_p99=None if kl_T is None else float(kl_T.kthvalue(max(1, math.ceil(0.99 * len(kl_T)))).values),
            same_top1=None if self.same is None else self.same / self.tokens,
        )

    def _error(self, mean: float) -> float | None:
        count = len(self.windows)
        if count < 2:
            return None
        squares = sum((total - mean * tokens) ** 2 for tokens, total in self.windows)
        return math.sqrt(count / (count - 1) * squares) / self.tokens


def negative_log_likelihood(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Returns the negative log likelihood of each target, float32 [T], in nats."""
    return F.cross_entropy(logits_TV, targets_T, reduction="none")


def divergence(parent_TV: Tensor, model_TV: Tensor) -> tuple[Tensor, int]:
    """Returns the divergence KL(parent | model) of each row, float32 [T], in nats. Also returns the number of rows in
    which model and parent agree on the most likely token.
    """
    parts, same = [], 0
    for at in range(0, len(parent_TV), _ROWS):
        parent, model = parent_TV[at : at + _ROWS], model_TV[at : at + _ROWS]
        same += int((parent.argmax(-1) == model.argmax(-1)).sum())
        log_p, log_q = parent.log_softmax(-1), model.log_softmax(-1)
        # Rounding may give -1e-8 where both are equal.
        parts.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp_(min=0.0))
    return torch.cat(parts), same


def _exp(nll: float) -> float:
    return math.exp(min(nll, 700.0))
