"""All layers of a decoder in one call of C (`c/layers.c`). Where a step has few tokens, the way through Python from one
operator to the next is a large part of the step.

The call computes what the C operators compute one by one, to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from raytide.kernels import compiled
from raytide.kernels.core import (
    Activation,
    AttentionSpec,
    HeadNorms,
    LayerWeights,
    Linear,
    NormWeights,
    PagedBatch,
    SideBySide,
)
from raytide.kernels.quantized import QuantizedLinear
from raytide.kernels.registry import Ops

Tensor = torch.Tensor

_MOST_PARTS = 3


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The properties that all layers of a decoder share.

    `ropes` are the cosines and sines of all positions. `rope_of` and `attention_of` have, for each layer, the index of
    its rotation, None for none, and of its attention.
    """

    dtype: torch.dtype
    hidden_size: int
    heads: int
    kv_heads: int
    dim: int
    activation: Activation
    is_gated: bool
    ropes: Sequence[tuple[Tensor, Tensor]]
    attentions: Sequence[AttentionSpec]
    rope_of: Sequence[int | None]
    attention_of: Sequence[int]


class _Norm(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("layer", ctypes.c_int32),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("n", "k", "quantized")),
    )


class _Linear(ctypes.Structure):
    _fields_ = (("products", _Product * _MOST_PARTS), ("count", ctypes.c_int64), ("n", ctypes.c_int64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("input", "after_attention", "ffn", "after_ffn")),
        *((name, _Linear) for name in ("qkv", "attention_out", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_int64) for name in ("rope", "attention")),
        ("head_eps", ctypes.c_float),
    )


class _Rope(ctypes.Structure):
    _fields_ = (("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("turned", ctypes.c_int64))


class _Pass(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("layers", "caches", "attentions", "ropes", "positions", "slots", "x", "delta")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("num_layers", "tokens", "hidden", "heads", "kv_heads", "dim", "ffn", "num_slots")
        ),
        *((name, ctypes.c_int32) for name in ("gated", "kind", "bf16", "int8")),
    )


class LayersInOneCall:
    """All layers of a decoder over the tokens of a step."""

    def __init__(self, layers: Sequence[LayerWeights], described: Sequence[_Layer], spec: DecoderSpec, invariant: bool):
        self._lib, self._kept = compiled.loaded_library(), (layers, spec)
        self._layers = (_Layer * len(described))(*described)
        self._ropes = (_Rope * len(spec.ropes))(
            *(_Rope(cos.data_ptr(), sin.data_ptr(), cos.shape[-1]) for cos, sin in spec.ropes)
        )
        self._attentions = (compiled.Geometry * len(spec.attentions))()
        self._pointers = ctypes.c_void_p * len(described)
        is_bf16 = spec.dtype == torch.bfloat16
        for each, attention in zip(self._attentions, spec.attentions, strict=True):
            each.set_spec(attention)
            each.invariant, each.bf16 = invariant, is_bf16
            each.heads, each.kv_heads, each.dim = spec.heads, spec.kv_heads, spec.dim
            each.q_stride = (spec.heads + 2 * spec.kv_heads) * spec.dim
        self._pass = _Pass(
            layers=ctypes.addressof(self._layers),
            ropes=ctypes.addressof(self._ropes),
            num_layers=len(described),
            hidden=spec.hidden_size,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            dim=spec.dim,
            ffn=max(each.down.products[0].k for each in described),
            gated=spec.is_gated,
            kind=compiled.KINDS[spec.activation],
            bf16=is_bf16,
        )

    def __call__(
        self, x_TN: Tensor, delta_TN: Tensor, positions_T: Tensor, batch: PagedBatch, caches: Sequence[Tensor]
    ) -> None:
        """Writes the KV of all tokens into the layers' caches, and changes x and delta, whose sum was the first layer's
        input: afterwards it is the last layer's output. Raises MemoryError.
        """
        lib = self._lib
        lib.follow_threads()
        attentions = type(self._attentions).from_buffer_copy(self._attentions)
        here = _Pass.from_buffer_copy(self._pass)
        pointers = self._pointers(*[cache.data_ptr() for cache in caches])
        here.num_slots, here.int8 = caches[0].shape[1], caches[0].dtype == torch.int8
        kept = []
        for each in attentions:
            kept.append(each.set_batch(batch))
            each.int8, each.num_slots = here.int8, here.num_slots
        here.tokens, here.x, here.delta = x_TN.shape[0], x_TN.data_ptr(), delta_TN.data_ptr()
        here.positions, here.slots = positions_T.data_ptr(), batch.slots_T.data_ptr()
        here.caches, here.attentions = ctypes.addressof(pointers), ctypes.addressof(attentions)
        if lib.layers(ctypes.addressof(here)) != 0:
            raise MemoryError(f"no memory for the layers' intermediate results of {len(x_TN)} tokens")


def layers_in_one_call(ops: Ops, layers: Sequence[LayerWeights], spec: DecoderSpec) -> LayersInOneCall | None:
    """Returns the layers in one call; None if they need operators that are not in C, or shapes that these lack."""
    own = (compiled.norm, compiled.add_norm, compiled.rope_write, compiled.activate, compiled.activate_mul)
    if (ops.norm, ops.add_norm, ops.rope_write, ops.activate, ops.activate_mul) != own or not layers:
        return None
    if ops.attention not in (compiled.attention, compiled.invariant_attention):
        return None
    if not compiled.loaded_library().attends(spec.heads, spec.kv_heads, spec.dim):
        return None
    if not _fit(spec, (each for pair in spec.ropes for each in pair)):
        return None
    described = [_described(index, each, spec) for index, each in enumerate(layers)]
    whole = [each for each in described if each is not None]
    if len(whole) < len(described):
        return None
    return LayersInOneCall(layers, whole, spec, ops.attention is compiled.invariant_attention)


def _fit(spec: DecoderSpec, tensors: Iterable[Tensor | None]) -> bool:
    return spec.dtype in compiled.DTYPES and all(
        each is None or (each.dtype == spec.dtype and each.is_contiguous()) for each in tensors
    )


def _described(index: int, layer: LayerWeights, spec: DecoderSpec) -> _Layer | None:
    norms = [layer.input_norm, layer.post_attention_norm, layer.ffn_norm, layer.post_ffn_norm]
    heads = layer.head_norms or HeadNorms(None, None, 0.0)  # type: ignore[arg-type]
    vectors = [each for norm in norms if norm is not None for each in (norm.weight, norm.bias)]
    linears = [_linear(each, spec) for each in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)]
    if any(each is None for each in linears) or not _fit(spec, [*vectors, heads.q_D, heads.k_D]):
        return None
    rope = spec.rope_of[index]
    return _Layer(
        *map(_norm, norms),
        *linears,
        *(None if each is None else each.data_ptr() for each in (heads.q_D, heads.k_D)),
        -1 if rope is None else rope,
        spec.attention_of[index],
        heads.eps,
    )


def _norm(by: NormWeights | None) -> _Norm:
    if by is None:
        return _Norm()
    return _Norm(by.weight.data_ptr(), None if by.bias is None else by.bias.data_ptr(), by.eps, by.kind == "layer")


def _linear(linear: Linear | None, spec: DecoderSpec) -> _Linear | None:
    parts = linear.linears if isinstance(linear, SideBySide) else [linear]
    if len(parts) > _MOST_PARTS:
        return None
    described = _Linear(count=len(parts))
    for index, part in enumerate(parts):
        if isinstance(part, QuantizedLinear):
            described.products[index] = _Product(part.here, None, part.size, part.width, True)
        elif isinstance(part, compiled.PackedLinear) and part.dtype == spec.dtype:
            described.products[index] = _Product(part.start, part.bias_start, part.size, part.width, False)
        else:
            return None
        described.n += part.size
    return described
