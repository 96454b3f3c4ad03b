"""Mixture-of-experts feed-forward layers: their sizes, and how configs give them."""

from __future__ import annotations

from dataclasses import dataclass

from raytide.actors.models.model_config import Fields
from raytide.core.errors import DataError

MOST_EXPERTS = 1024
_MOST_ALL_EXPERTS = 1 << 17
"""The most experts in all layers together: each has a few names among the weights."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts feed-forward layer. Each token uses `per_token` of the `count` experts, those that the
    router finds most likely.
    """

    count: int
    per_token: int
    ffn_size: int
    renormalize: bool  # scale the chosen experts' probabilities to sum to 1
    balance: float = 0.0  # weight of the load-balancing loss in training


def checked(experts: Experts, fields: Fields, layers: int) -> Experts:
    """Returns `experts`. Raises DataError if a model of `layers` layers cannot have them."""
    if experts.count * layers > _MOST_ALL_EXPERTS:
        raise DataError(
            f"{fields.where}: {experts.count} experts in {layers} layers are not supported.",
            hint=f"At most {_MOST_ALL_EXPERTS} together.",
        )
    if experts.per_token > experts.count:
        raise DataError(
            f"{fields.where}: a token goes to {experts.per_token} of {experts.count} experts.",
            hint="num_experts_per_tok must not exceed the number of experts.",
        )
    return experts


def balance_weight(fields: Fields) -> float:
    """Returns the weight of the load-balancing loss; 0 unless the config outputs router logits, as in transformers."""
    return fields.number("router_aux_loss_coef", 0.001) if fields.flag("output_router_logits", False) else 0.0
