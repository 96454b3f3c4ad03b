"""CPU variants of the operators, written in C (`kernels/c`), for bfloat16 and float32 and any number of rows.

The reference operators handle shapes and memory layouts that the C code does not support. The result of a row is
bit-identical for every batch that contains this row. Attention also has a faster variant for single new tokens. The
results of this variant can depend on the batch, so `deterministic` engines do not use it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F

from raytide.kernels import invariant as row_by_row
from raytide.kernels import ref
from raytide.kernels.core import Activation, AttentionSpec, HeadNorms, NormWeights, PagedBatch, Rope
from raytide.kernels.device import HUGE_PAGE_BYTES, in_huge_pages
from raytide.kernels.library import Library, library
from raytide.kernels.registry import register

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.bfloat16)
KINDS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_LINE = 64
"""The bytes of a cache line. A vector of weights never straddles two."""
_SLAB_BYTES = 32 << 20


def can_run() -> bool:
    """Returns whether the C library is available."""
    return library() is not None


def loaded_library() -> Library:
    """Returns the C library, which must be available. It is available if `can_run` returned True."""
    loaded = library()
    assert loaded is not None
    return loaded


class WeightsMemory:
    """Memory for packed weights. It uses huge pages where the kernel offers them.

    Every step reads all weights. With small pages, the processor would have to look up an address for every page. Small
    weights lie side by side in slabs. A slab is freed with the last of its weights.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, size: int) -> Tensor:
        """Returns `size` uninitialized bytes, at an address that is a multiple of 64."""
        rounded = -(-size // _LINE) * _LINE
        if rounded > _SLAB_BYTES // 2:
            return _huge(rounded)[:size]
        with self._lock:
            if self._used + rounded > len(self._slab):
                self._slab, self._used = _huge(_SLAB_BYTES), 0
            part = self._slab[self._used : self._used + size]
            self._used += rounded
        return part


def _huge(size: int) -> Tensor:
    """Returns uninitialized bytes from the start of a huge page on."""
    memory = torch.empty(size + HUGE_PAGE_BYTES, dtype=torch.uint8)
    begin = -memory.data_ptr() % HUGE_PAGE_BYTES
    return in_huge_pages(memory[begin : begin + size])


weights_memory = WeightsMemory()


def _fits(x: Tensor, *others: Tensor | None) -> bool:
    """Returns whether the C code can take these tensors: all contiguous, and all bfloat16 or all float32."""
    dtype = x.dtype
    return dtype in DTYPES and all(t is None or (t.dtype == dtype and t.is_contiguous()) for t in (x, *others))


@register("norm", "cpu", priority=20, probe=can_run, invariant=True)
def norm(x_TN: Tensor, by: NormWeights) -> Tensor:
    if not _fits(x_TN, by.weight, by.bias):
        return ref.norm(x_TN, by)
    return _norm(x_TN, None, by)


@register("add_norm", "cpu", priority=20, probe=can_run, invariant=True)
def add_norm(x_TN: Tensor, delta_TN: Tensor, by: NormWeights) -> Tensor:
    if not _fits(x_TN, delta_TN, by.weight, by.bias):
        return ref.add_norm(x_TN, delta_TN, by)
    return _norm(x_TN, delta_TN, by)


def _norm(x_TN: Tensor, delta_TN: Tensor | None, by: NormWeights) -> Tensor:
    out, size = torch.empty_like(x_TN), x_TN.shape[-1]
    loaded_library().norm(
        x_TN.data_ptr(),
        delta_TN.data_ptr() if delta_TN is not None else None,
        by.weight.data_ptr(),
        by.bias.data_ptr() if by.bias is not None else None,
        out.data_ptr(),
        x_TN.numel() // size,
        size,
        by.eps,
        x_TN.dtype == torch.bfloat16,
        by.kind == "layer",
    )
    return out


class PackedLinear:
    """A linear layer whose weight is not quantised. It packs the weight and keeps only the packed form."""

    __slots__ = ("_call", "_kept", "bias_start", "dtype", "is_bf16", "size", "start", "width")

    def __init__(self, weight: Tensor, bias: Tensor | None, words: int) -> None:
        """Packs a weight [N, K] into so many words."""
        lib = loaded_library()
        self.size, self.width = weight.shape
        self.dtype, self.is_bf16 = weight.dtype, weight.dtype == torch.bfloat16
        packed = weights_memory.take(words * 4)
        self.start = packed.data_ptr()
        lib.pack(weight.data_ptr(), self.start, self.size, self.width, self.is_bf16)
        self.bias_start = bias.data_ptr() if bias is not None else None
        self._kept, self._call = (packed, bias), lib.linear

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        size, width = self.size, self.width
        out, rows = torch.empty((*x.shape[:-1], size), dtype=self.dtype), x.numel() // width
        self._call(x.data_ptr(), self.start, self.bias_start, out.data_ptr(), rows, size, width, self.is_bf16)
        return out


@register("linear", "cpu", priority=20, probe=can_run, invariant=True)
def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Returns a linear layer of the C operators. If they cannot pack a weight of this shape, returns the reference's
    layer.

    bfloat16 inputs are packed in pairs. An odd one gets a zero beside it, as in adapters of odd ranks: the reference's
    product is not invariant.
    """
    size, width = weight.shape
    if width % 2 and weight.dtype == torch.bfloat16:
        padded = linear(F.pad(weight, (0, 1)), bias)
        return lambda x: padded(F.pad(x, (0, 1)))
    words = loaded_library().packed_words(size, width, weight.dtype == torch.bfloat16) if _fits(weight, bias) else 0
    return PackedLinear(weight, bias, words) if words else ref.linear(weight, bias)


@register("activate", "cpu", priority=20, probe=can_run, invariant=True)
def activate(x_TF: Tensor, kind: Activation) -> Tensor:
    if not _fits(x_TF):
        return ref.activate(x_TF, kind)
    return _activate(x_TF, x_TF.shape[-1], False, kind)


@register("activate_mul", "cpu", priority=20, probe=can_run, invariant=True)
def activate_mul(gate_up_T2F: Tensor, kind: Activation) -> Tensor:
    if not _fits(gate_up_T2F):
        return ref.activate_mul(gate_up_T2F, kind)
    return _activate(gate_up_T2F, gate_up_T2F.shape[-1] // 2, True, kind)


def _activate(x: Tensor, size: int, gated: bool, kind: Activation) -> Tensor:
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    loaded_library().activate(
        x.data_ptr(), out.data_ptr(), out.numel() // size, size, gated, KINDS[kind], x.dtype == torch.bfloat16
    )
    return out


@register("experts", "cpu", priority=20, probe=can_run, invariant=True)
def experts(gate_up_E2FN: Tensor, down_ENF: Tensor, kind: Activation) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    ups = [linear(weight, None) for weight in gate_up_E2FN]
    downs = [linear(weight, None) for weight in down_ENF]

    def apply(x_TN: Tensor, chosen_TX: Tensor, weights_TX: Tensor) -> Tensor:
        y_TN = torch.zeros_like(x_TN)
        for expert in chosen_TX.unique().tolist():
            rows, ways = (chosen_TX == expert).nonzero(as_tuple=True)
            out = downs[expert](activate_mul(ups[expert](x_TN[rows]), kind)) * weights_TX[rows, ways, None]
            y_TN.index_add_(0, rows, out.to(y_TN.dtype))
        return y_TN

    return apply


@register("rope_write", "cpu", priority=20, probe=can_run, invariant=True)
def rope_write(
    qkv_TAD: Tensor, rope: Rope | None, norms: HeadNorms | None, cache_2SKD: Tensor, slots_T: Tensor
) -> None:
    cos, sin = (rope.cos_TR, rope.sin_TR) if rope is not None else (None, None)
    q_weight, k_weight = (norms.q_D, norms.k_D) if norms is not None else (None, None)
    is_int8 = cache_2SKD.dtype == torch.int8 and cache_2SKD.is_contiguous()
    if not _fits(qkv_TAD, None if is_int8 else cache_2SKD, cos, sin, q_weight, k_weight):
        ref.rope_write(qkv_TAD, rope, norms, cache_2SKD, slots_T)
        return
    tokens, rows, dim = qkv_TAD.shape
    kv_heads = cache_2SKD.shape[2]
    loaded_library().rope_write(
        qkv_TAD.data_ptr(),
        cos.data_ptr() if cos is not None else None,
        sin.data_ptr() if sin is not None else None,
        None,
        q_weight.data_ptr() if q_weight is not None else None,
        k_weight.data_ptr() if k_weight is not None else None,
        cache_2SKD.data_ptr(),
        slots_T.data_ptr(),
        tokens,
        rows - 2 * kv_heads,
        kv_heads,
        dim,
        cos.shape[-1] if cos is not None else 0,
        cache_2SKD.shape[1],
        norms.eps if norms is not None else 0.0,
        qkv_TAD.dtype == torch.bfloat16,
        is_int8,
    )


class Geometry(ctypes.Structure):
    """The C struct of attention.h with the parameters of an attention operator and the sequences of a step."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tables", "query_lens", "context_lens")),
        *((name, ctypes.c_int64) for name in ("batch", "table_width", "block_size", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("bf16", "invariant", "int8")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "q_stride", "num_slots")),
    ]

    def set_batch(self, batch: PagedBatch) -> object:
        """Describes the sequences of a step in this struct. Returns the buffers to which the struct then points.

        The caller must keep the buffers alive while the struct is used.
        """
        tables, count = batch.block_tables_BM.contiguous(), len(batch.query_lens)
        lens = (ctypes.c_int64 * (2 * count))(*batch.query_lens, *batch.context_lens)
        self.batch, self.table_width, self.block_size = count, tables.shape[1], batch.block_size
        self.tables, self.query_lens = tables.data_ptr(), ctypes.addressof(lens)
        self.context_lens = self.query_lens + 8 * count
        return tables, lens

    def set_spec(self, spec: AttentionSpec) -> None:
        self.window, self.scale, self.softcap = spec.window or 0, spec.scale, spec.softcap or 0.0


@register("attention", "cpu", priority=20, probe=can_run)
def attention(batch: PagedBatch, spec: AttentionSpec) -> Callable[[Tensor, Tensor], Tensor]:
    return _attention(batch, spec, invariant=False)


@register("attention", "cpu", priority=15, probe=can_run, invariant=True)
def invariant_attention(batch: PagedBatch, spec: AttentionSpec) -> Callable[[Tensor, Tensor], Tensor]:
    return _attention(batch, spec, invariant=True)


def _attention(batch: PagedBatch, spec: AttentionSpec, invariant: bool) -> Callable[[Tensor, Tensor], Tensor]:
    lib = loaded_library()
    lib.follow_threads()
    geometry = Geometry(invariant=invariant)
    geometry.set_spec(spec)
    pointed_to, here = geometry.set_batch(batch), ctypes.addressof(geometry)

    def attend(q_THD: Tensor, cache_2SKD: Tensor, kept: object = (pointed_to, geometry)) -> Tensor:
        tokens, heads, dim = q_THD.shape
        num_slots, kv_heads = cache_2SKD.shape[1:3]
        if not (
            q_THD.dtype in DTYPES
            and cache_2SKD.is_contiguous()
            and cache_2SKD.dtype in (q_THD.dtype, torch.int8)
            and q_THD.stride()[1:] == (dim, 1)
            and lib.attends(heads, kv_heads, dim)
        ):
            attention = row_by_row.attention if invariant else ref.attention
            return attention(batch, spec)(q_THD, cache_2SKD)
        geometry.bf16, geometry.int8 = q_THD.dtype == torch.bfloat16, cache_2SKD.dtype == torch.int8
        geometry.heads, geometry.kv_heads, geometry.dim = heads, kv_heads, dim
        geometry.q_stride, geometry.num_slots = q_THD.stride(0), num_slots
        out = torch.empty((tokens, heads, dim), dtype=q_THD.dtype)
        if lib.attention(here, q_THD.data_ptr(), cache_2SKD.data_ptr(), out.data_ptr()) != 0:
            raise MemoryError("attention: no memory for the list of its work")
        return out

    return attend
