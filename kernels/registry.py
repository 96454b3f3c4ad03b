"""Chooses the implementation of each operator for a device.

Every operator has a torch reference in `ref.py`, registered for the device "any". It defines the correct result,
runs everywhere, and is the oracle in tests. A faster variant is registered for one device, with a higher priority.
If the variant needs an instruction set, a compiler or a private API, it has a probe, which checks whether the
variant works on this machine. A variant is invariant if the result of a row is bit-identical for every batch that
contains this row. A deterministic engine uses only invariant variants. RAYTIDE_OP_<NAME>=ref forces an operator's
reference, for instance RAYTIDE_OP_ATTENTION=ref. RAYTIDE_OPS=ref forces the references of all operators.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import torch

from raytide.core.config import environment
from raytide.core.errors import ConfigError
from raytide.kernels.core import (
    Activation,
    AttentionSpec,
    HeadNorms,
    LinearInput,
    NormWeights,
    PagedBatch,
    QuantizedWeight,
    Rope,
)

Tensor = torch.Tensor
Impl = TypeVar("Impl", bound=Callable[..., object])

# device kind -> the modules whose import registers its variants
_MODULES = {
    "any": ("ref", "invariant"),
    "cpu": ("cpu", "compiled", "quantized", "amx"),
    "cuda": ("triton.operators",),
    "rocm": ("triton.operators",),
}


@dataclass(frozen=True, slots=True)
class Ops:
    """The operators of which a decoder is made, chosen once for a device. `ref.py` defines their signatures and
    contracts.

    `linear`, `quantized_linear` and `experts` return a function that is bound to the weights. A backend may pack these
    weights once. `attention` returns a function that is bound to the batch of a step. A backend may sort the batch once
    for all layers.
    """

    norm: Callable[[Tensor, NormWeights], Tensor]
    add_norm: Callable[[Tensor, Tensor, NormWeights], Tensor]
    linear: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
    quantized_linear: Callable[[QuantizedWeight, Tensor | None, LinearInput], Callable[[Tensor], Tensor]]
    activate: Callable[[Tensor, Activation], Tensor]
    activate_mul: Callable[[Tensor, Activation], Tensor]
    experts: Callable[[Tensor, Tensor, Activation], Callable[[Tensor, Tensor, Tensor], Tensor]]
    rope_write: Callable[[Tensor, Rope | None, HeadNorms | None, Tensor, Tensor], None]
    attention: Callable[[PagedBatch, AttentionSpec], Callable[[Tensor, Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class _Variant:
    device: str
    priority: int
    probe: Callable[[], bool]
    invariant: bool
    impl: Callable[..., object]


_variants: dict[str, list[_Variant]] = {}


def register(
    op: str,
    device: str,
    *,
    priority: int = 10,
    probe: Callable[[], bool] = lambda: True,
    invariant: bool = False,
) -> Callable[[Impl], Impl]:
    """Returns a decorator that registers an implementation of `op` for a device. `probe` returns whether the
    implementation works on this machine.
    """

    def remember(impl: Impl) -> Impl:
        _variants.setdefault(op, []).append(_Variant(device, priority, probe, invariant, impl))
        return impl

    return remember


def ops_for(device: str, deterministic: bool = False) -> Ops:
    """Returns, for each operator, the working implementation with the highest priority on a device.

    If `deterministic` is True, only invariant implementations are considered.
    """
    for kind in ("any", device):
        for module in _MODULES.get(kind, ()):
            importlib.import_module(f"raytide.kernels.{module}")
    chosen = {field.name: _select(field.name, device, deterministic) for field in fields(Ops)}
    return Ops(**chosen)  # type: ignore[arg-type]


def _select(op: str, device: str, deterministic: bool) -> Callable[..., object]:
    forced = _forced("OPS") or _forced(f"OP_{op.upper()}")
    kinds = ("any",) if forced else ("any", device)
    offers = [v for v in _variants[op] if v.device in kinds and (v.invariant or not deterministic)]
    offers.sort(key=lambda v: v.priority, reverse=True)
    return next(variant.impl for variant in offers if variant.probe())


def _forced(name: str) -> bool:
    value = environment(name)
    if value not in (None, "ref"):
        raise ConfigError(f"RAYTIDE_{name} is {value!r}.", hint="Only ref can be forced; unset it otherwise.")
    return value == "ref"
