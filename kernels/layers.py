"""A decoder's forward pass in one call of C (`c/layers.c`). With few tokens in a step, Python's overhead between
operators is a large part of the step.

The result is bit-identical to the result of the separate C operators.
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
Entered = tuple[Tensor, Tensor]
"""The first layer's input [T, N]: the residual stream, and the tensor that the layer first adds to it."""

_MOST_PARTS = 3


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The parameters of a decoder other than its layers' weights.

    `embedding_VN` has a row for each token of the vocabulary. `norm` is the last norm. `head` is None if C cannot
    compute the logits. `ropes` are the cosines and sines of all positions. `rope_of` has, for each layer, the index of
    its rotation in `ropes`, or None if the layer has no rotation. `attention_of` has, for each layer, the index of its
    attention in `attentions`.
    """

    embedding_VN: Tensor
    norm: NormWeights
    head: Linear | None
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
        *((name, ctypes.c_void_p) for name in ("layers", "caches", "attentions", "ropes", "embedding")),
        ("last", _Norm),
        ("head", _Linear),
        *((name, ctypes.c_void_p) for name in ("ids", "positions", "slots", "rows", "x", "delta", "normed", "logits")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_layers", "tokens", "num_rows", "hidden", "heads", "kv_heads", "dim", "ffn", "num_slots")
        ),
        *((name, ctypes.c_int32) for name in ("gated", "kind", "bf16", "int8")),
    )


class PassInOneCall:
    """The forward pass of a decoder over the tokens of one step, computed in one call of C."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        described: Sequence[_Layer],
        head: _Linear | None,
        spec: DecoderSpec,
        invariant: bool,
    ) -> None:
        self._lib, self._kept = compiled.loaded_library(), (layers, spec)
        self.has_head = head is not None
        self._layers = (_Layer * len(described))(*described)
        self._ropes = (_Rope * len(spec.ropes))(
            *(_Rope(cos.data_ptr(), sin.data_ptr(), cos.shape[-1]) for cos, sin in spec.ropes)
        )
        self._attentions = (compiled.Geometry * len(spec.attentions))()
        self._pointers = ctypes.c_void_p * len(described)
        self._dtype, self._hidden_size = spec.embedding_VN.dtype, spec.embedding_VN.shape[1]
        is_bf16 = self._dtype == torch.bfloat16
        for each, attention in zip(self._attentions, spec.attentions, strict=True):
            each.set_spec(attention)
            each.invariant, each.bf16 = invariant, is_bf16
            each.heads, each.kv_heads, each.dim = spec.heads, spec.kv_heads, spec.dim
            each.q_stride = (spec.heads + 2 * spec.kv_heads) * spec.dim
        self._pass = _Pass(
            layers=ctypes.addressof(self._layers),
            ropes=ctypes.addressof(self._ropes),
            embedding=spec.embedding_VN.data_ptr(),
            last=_norm(spec.norm),
            head=head or _Linear(),
            num_layers=len(described),
            hidden=self._hidden_size,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            dim=spec.dim,
            ffn=max(each.down.products[0].k for each in described),
            gated=spec.is_gated,
            kind=compiled.KINDS[spec.activation],
            bf16=is_bf16,
        )

    def __call__(
        self,
        entered: Tensor | Entered,
        positions_T: Tensor,
        rows_R: Tensor,
        batch: PagedBatch,
        caches: Sequence[Tensor],
        *,
        head: bool,
    ) -> Tensor:
        """Writes the KV of all tokens into the layers' caches. Returns the normed last hidden states [R, N] of the
        tokens `rows_R`, or with `head` their float32 logits [R, V].

        `entered` has the tokens' ids, each a row of the embedding, which is not checked here; or the first layer's
        input, which changes. Raises MemoryError.
        """
        here = self._entering(entered)
        result_R = normed_RN = torch.empty(len(rows_R), self._hidden_size, dtype=self._dtype)
        here.num_rows, here.rows, here.normed = len(rows_R), rows_R.data_ptr(), normed_RN.data_ptr()
        if head:
            result_R = torch.empty(len(rows_R), here.head.n)
            here.logits = result_R.data_ptr()
        self._run(here, positions_T, batch, caches)
        return result_R

    def layers(self, entered: Entered, positions_T: Tensor, batch: PagedBatch, caches: Sequence[Tensor]) -> None:
        """Computes only the decoder layers: not the embedding, the last norm or the head. Overwrites the tensors in
        `entered` with the last layer's output.
        """
        self._run(self._entering(entered), positions_T, batch, caches)

    def _entering(self, entered: Tensor | Entered) -> _Pass:
        here = _Pass.from_buffer_copy(self._pass)
        if isinstance(entered, Tensor):
            here.ids = entered.data_ptr()
        else:
            here.x, here.delta = entered[0].data_ptr(), entered[1].data_ptr()
        return here

    def _run(self, here: _Pass, positions_T: Tensor, batch: PagedBatch, caches: Sequence[Tensor]) -> None:
        self._lib.follow_threads()
        attentions = type(self._attentions).from_buffer_copy(self._attentions)
        pointers = self._pointers(*[cache.data_ptr() for cache in caches])
        here.num_slots, here.int8 = caches[0].shape[1], caches[0].dtype == torch.int8
        kept = []
        for each in attentions:
            kept.append(each.set_batch(batch))
            each.int8, each.num_slots = here.int8, here.num_slots
        here.tokens, here.positions, here.slots = len(positions_T), positions_T.data_ptr(), batch.slots_T.data_ptr()
        here.caches, here.attentions = ctypes.addressof(pointers), ctypes.addressof(attentions)
        if self._lib.layers(ctypes.addressof(here)) != 0:
            raise MemoryError(f"no memory for the intermediate results of {len(positions_T)} tokens")


def pass_in_one_call(ops: Ops, layers: Sequence[LayerWeights], spec: DecoderSpec) -> PassInOneCall | None:
    """Returns a function that computes the forward pass in one call of the C code. Returns None if the layers need
    operators or shapes that the C code does not have.
    """
    own = (compiled.norm, compiled.add_norm, compiled.rope_write, compiled.activate, compiled.activate_mul)
    if (ops.norm, ops.add_norm, ops.rope_write, ops.activate, ops.activate_mul) != own or not layers:
        return None
    if ops.attention not in (compiled.attention, compiled.invariant_attention):
        return None
    if not compiled.loaded_library().attends(spec.heads, spec.kv_heads, spec.dim):
        return None
    ends = (spec.embedding_VN, spec.norm.weight, spec.norm.bias)
    if not _fit(spec, [*ends, *(each for pair in spec.ropes for each in pair)]):
        return None
    described = [_described(index, each, spec) for index, each in enumerate(layers)]
    whole = [each for each in described if each is not None]
    if len(whole) < len(described):
        return None
    head = None if spec.head is None else _linear(spec.head, spec)
    return PassInOneCall(layers, whole, head, spec, ops.attention is compiled.invariant_attention)


def _fit(spec: DecoderSpec, tensors: Iterable[Tensor | None]) -> bool:
    dtype = spec.embedding_VN.dtype
    return dtype in compiled.DTYPES and all(
        each is None or (each.dtype == dtype and each.is_contiguous()) for each in tensors
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
        elif isinstance(part, compiled.PackedLinear) and part.dtype == spec.embedding_VN.dtype:
            described.products[index] = _Product(part.start, part.bias_start, part.size, part.width, False)
        else:
            return None
        described.n += part.size
    return described
