"""Rotary position embeddings, with every scaling that the supported families use.

The formulas and their float32 precision are those of transformers' `modeling_rope_utils`: linear (Kaiokendev), llama3
(Llama 3.1), yarn (Peng et al. 2023) and longrope (Ding et al. 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raytide.actors.models.model_config import Fields
from raytide.core.bounds import shortened
from raytide.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

_KINDS = ("default", "linear", "llama3", "longrope", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """A rotary embedding that rotates `dim` elements of each head. `kind` is the type of scaling. Fields that this type
    does not use keep their defaults.
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_len: int = 0
    magnitude: float = 1.0  # multiplies cos and sin
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def read_rope(parameters: Fields, *, head_dim: int, theta: float, partial: float, config: Fields) -> RopeSpec:
    """Reads a rotary embedding from `rope_parameters` (transformers 5) or `rope_scaling` (transformers 4). `theta` and
    `partial` are the defaults for missing parameters.
    """
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in _KINDS:
        raise ConfigError(
            f"{parameters.where}: rope scaling {shortened(kind, 100)} is not supported.",
            hint=f"Supported: {', '.join(_KINDS)}.",
        )
    dim = int(head_dim * parameters.number("partial_rotary_factor", partial))
    if dim % 2 or not 0 < dim <= head_dim:
        raise DataError(
            f"{parameters.where}: {dim} of {head_dim} elements cannot be rotated in pairs.",
            hint="Export the model again.",
        )
    theta = parameters.number("rope_theta", theta, above=1)
    if kind == "default":
        return RopeSpec(dim=dim, theta=theta)
    if kind == "linear":
        return RopeSpec(dim=dim, theta=theta, kind=kind, factor=parameters.number("factor", above=0))
    max_len = config.whole("max_position_embeddings")
    original = config.whole(
        "original_max_position_embeddings", parameters.whole("original_max_position_embeddings", max_len)
    )
    spec = RopeSpec(dim=dim, theta=theta, kind=kind, original_max_len=original)
    if kind == "llama3":
        return replace(
            spec,
            factor=parameters.number("factor", above=0),
            low_freq_factor=parameters.number("low_freq_factor", above=0),
            high_freq_factor=parameters.number("high_freq_factor", above=0),
        )
    factor = parameters.number("factor", max_len / original, above=0)
    if kind == "yarn":
        return replace(
            spec,
            factor=factor,
            magnitude=parameters.number("attention_factor", _yarn_magnitude(parameters, factor)),
            beta_fast=parameters.number("beta_fast", 32.0, above=0),
            beta_slow=parameters.number("beta_slow", 1.0, above=0),
            truncate=parameters.flag("truncate", True),
        )
    grown = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    return replace(
        spec,
        factor=factor,
        magnitude=parameters.number("attention_factor", grown),
        short_factors=parameters.numbers("short_factor", dim // 2),
        long_factors=parameters.numbers("long_factor", dim // 2),
    )


def cos_sin(spec: RopeSpec, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float32 cos and sin [max_len, dim]. The first half of sin is negated, as the rope operator expects."""
    import torch

    angles = torch.outer(torch.arange(max_len).float(), _frequencies(spec, max_len))
    cos, sin = angles.cos() * spec.magnitude, angles.sin() * spec.magnitude
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def uses_long_factors(spec: RopeSpec, max_len: int) -> bool:
    """Returns whether an engine with sequences of up to `max_len` tokens rotates by longrope's long factors. KV of one
    set of factors has no meaning with the other.
    """
    return spec.kind == "longrope" and max_len > spec.original_max_len


def _frequencies(spec: RopeSpec, max_len: int) -> torch.Tensor:
    """Returns the angle by which each pair rotates per position, in radians.

    Longrope has two sets of factors. transformers switches to the long set once a sequence exceeds the original length,
    although earlier KV was computed with the short set. As in vLLM, an engine whose sequences may exceed that length
    uses the long set from the start.
    """
    import torch

    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    plain = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain)
    if spec.kind == "longrope":
        factors = spec.long_factors if uses_long_factors(spec, max_len) else spec.short_factors
        return 1.0 / (torch.tensor(factors) * spec.theta**exponents)
    return plain


def _llama3(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Returns llama3's frequencies: those of long wavelengths are divided by the factor, short ones kept, and those
    between blended.
    """
    turns = spec.original_max_len * plain / (2 * math.pi)
    kept = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - kept) * plain / spec.factor + kept * plain


def _yarn(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Returns yarn's frequencies: pairs that rotate more than `beta_fast` times in the original length are kept, those
    that rotate less than `beta_slow` times divided by the factor, and those between blended.
    """
    import torch

    def pair_that_turns(times: float) -> float:
        return spec.dim * math.log(spec.original_max_len / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_that_turns(spec.beta_fast), pair_that_turns(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    high = high + 0.001 if low == high else high
    divided = ((torch.arange(spec.dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    return plain / spec.factor * divided + plain * (1 - divided)


def _yarn_magnitude(parameters: Fields, factor: float) -> float:
    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    return grown(above) / grown(below) if above and below else grown(1.0)
