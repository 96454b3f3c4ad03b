"""Reads the weights of a GGUF file. Callers name the tensors as in Hugging Face directories."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from raytide.actors.models.quantized.cutting import Block, Range, SplitsGroupError, cut_inputs
from raytide.actors.models.quantized.gguf.gguf_config import family_of
from raytide.actors.models.quantized.gguf.gguf_file import BLOCK_FORMATS, GgufFile, GgufTensor
from raytide.core.errors import DataError
from raytide.kernels.core import QuantizedWeight

Tensor = torch.Tensor

_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NO_WEIGHTS = frozenset({"rope_freqs.weight"})
_MOST_NAMED = 5


class GgufWeights:
    """The tensors of a GGUF file, converted to one dtype and moved to one device. Implements `ModelWeights`."""

    def __init__(self, file: GgufFile, dtype: torch.dtype, device: torch.device) -> None:
        self._file, self._dtype, self._device = file, dtype, device
        self._permutes = family_of(file).permutes
        name = file.text("general.architecture")
        self._heads = int(file.number(f"{name}.attention.head_count"))
        self._kv_heads = int(file.number(f"{name}.attention.head_count_kv", self._heads))
        self._read = set[str]()

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._file.tensors

    def get(self, name: str, *shape: int) -> Tensor:
        return self._outputs(name, shape, (0, shape[0]))

    def block(self, name: str, shape: Sequence[int], where: tuple[slice, ...]) -> Tensor:
        """Returns the part of a tensor that the slices `where` select. `shape` is the shape of the whole tensor. Reads
        whole rows from the file, even if the part has only some of their columns.
        """
        rows, *others = where
        return self._outputs(name, tuple(shape), (rows.start, rows.stop))[(slice(None), *others)].clone()

    def stack(self, names: list[str], rows: list[int], *rest: int) -> Tensor:
        return torch.cat([self.get(name, size, *rest) for name, size in zip(names, rows, strict=True)])

    def quantized(self, module: str, rows: int, columns: int) -> QuantizedWeight | None:
        return self._quantized_outputs(module, rows, columns, (0, rows))

    def _outputs(self, name: str, shape: tuple[int, ...], outputs: Range) -> Tensor:
        """Returns the rows `outputs` of a tensor, dequantized if necessary."""
        tensor = self._tensor(name, shape)
        if is_float(tensor.format):
            rows = self._rows_of(name, tensor, outputs)
            values = rows.flatten().view(_FLOATS[tensor.format]).view(rows.shape[0], *shape[1:])
            return values.to(dtype=self._dtype, device=self._device)
        if len(shape) != 2:
            raise self._wrong(name, "is quantized, but no matrix")
        weight = self._quantized_outputs(name.removesuffix(".weight"), *shape, outputs)
        assert weight is not None
        return weight.dequantized().to(self._dtype)

    def _quantized_outputs(self, module: str, rows: int, columns: int, outputs: Range) -> QuantizedWeight | None:
        name = f"{module}.weight"
        if name not in self or is_float(self._file.tensors[_gguf_name(name)].format):
            return None
        tensor = self._tensor(name, (rows, columns))
        numbers, block_bytes = BLOCK_FORMATS[tensor.format]
        raw = self._rows_of(name, tensor, outputs)
        weight = _READERS[tensor.format](raw.view(-1, columns // numbers, block_bytes))
        for values in (weight.scales_NG, weight.offsets_NG):
            if values is not None and not bool(values.isfinite().all()):
                raise self._wrong(name, "has scales that are not finite")
        return _moved(weight, self._device)

    def quantized_block(self, module: str, rows: int, columns: int, block: Block) -> QuantizedWeight | None:
        """Returns a block of a quantized module's weight, or None if the module is not quantized. Reads whole rows from
        the file. Raises SplitsGroupError if the block's inputs would split a quantization group.
        """
        own = self._quantized_outputs(module, rows, columns, block.outputs)
        if own is None or block.inputs == (0, columns):
            return own
        if (part := cut_inputs(own, *block.inputs)) is None:
            raise SplitsGroupError
        return part

    def check_all_read(self) -> None:
        if stray := sorted(self._file.tensors.keys() - self._read - _NO_WEIGHTS):
            raise DataError(
                f"{self._file.where} has tensors that its architecture does not: {', '.join(stray[:_MOST_NAMED])}.",
                hint="Its model is a variant that is not computed here; use the Hugging Face directory.",
            )

    @property
    def quantization(self) -> str:
        counts = Counter(self._file.tensors[name].format for name in self._read)
        blocks = [name for name, _ in counts.most_common() if not is_float(name)]
        return f"gguf {', '.join(blocks)}" if blocks else ""

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        there = _gguf_name(name)
        tensor = self._file.tensors.get(there)
        if tensor is None:
            raise DataError(
                f"{self._file.where} has no tensor {there} ({name}).", hint="Download or convert the model again."
            )
        if tensor.shape != shape:
            raise self._wrong(name, f"has shape {tensor.shape}, its fields imply {shape}")
        self._read.add(there)
        return tensor

    def _rows_of(self, name: str, tensor: GgufTensor, outputs: Range) -> Tensor:
        """Returns the bytes [rows, bytes] of the rows `outputs`, counted in Hugging Face's order."""
        order = self._rows(name, tensor.shape[0])
        if order is None:
            return self._raw(tensor, outputs)
        own = order[slice(*outputs)]  # those of a head lie together
        first = int(own.min())
        return self._raw(tensor, (first, int(own.max()) + 1))[own - first]

    def _raw(self, tensor: GgufTensor, rows: Range) -> Tensor:
        """Returns a copy of the bytes of a tensor's rows, and releases the pages of the mapped file."""
        data, row_bytes = self._file.data, tensor.bytes // tensor.shape[0]
        start, end = (tensor.start + row * row_bytes for row in rows)
        raw = torch.frombuffer(bytearray(data[start:end]), dtype=torch.uint8).view(-1, row_bytes)
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, first, end - first)
        return raw

    def _rows(self, name: str, rows: int) -> Tensor | None:
        """Returns the file's row for each row in Hugging Face's order; None if both orders are the same. In query and
        key heads, Llama's files store the two numbers of a rotated pair side by side; Hugging Face stores them half a
        head apart.
        """
        heads = self._heads if ".q_proj." in name else self._kv_heads if ".k_proj." in name else 0
        if not self._permutes or not heads or rows % (2 * heads):
            return None
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)

    def _wrong(self, name: str, what: str) -> DataError:
        return DataError(
            f"{self._file.where}: tensor {_gguf_name(name)} {what}.", hint="Download or convert the model again."
        )


def _gguf_name(name: str) -> str:
    """Returns a tensor's name in GGUF. If GGUF has no such tensor, it returns `name`, which no file contains."""
    module, _, suffix = name.rpartition(".")
    if module in _MODULES:
        return f"{_MODULES[module]}.{suffix}"
    match = _LAYER.fullmatch(module)
    if match is None or match[2] not in _LAYER_MODULES:
        return name
    return f"blk.{match[1]}.{_LAYER_MODULES[match[2]]}.{suffix}"


def _moved(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    offsets = None if weight.offsets_NG is None else weight.offsets_NG.to(device)
    return QuantizedWeight(weight.bits, weight.codes_NK.to(device), weight.scales_NG.to(device), offsets)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_float(form: str) -> bool:
    return form in _FLOATS


# GGUF's block formats as codes, scales and offsets. Layouts: `ggml-quants.c` of llama.cpp. Each function returns the
# weight in blocks [N, B, bytes] of its format.
def _q8_0(blocks_NBb: Tensor) -> QuantizedWeight:
    """Reads blocks of a scale and 32 codes."""
    return QuantizedWeight(8, blocks_NBb[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks_NBb, 0))


def _q4_0(blocks_NBb: Tensor) -> QuantizedWeight:
    """Reads blocks of a scale and 32 codes. Codes are stored with 8 added; the first 16 are in the low nibbles."""
    return QuantizedWeight(4, _nibbles(blocks_NBb[..., 2:]), _half(blocks_NBb, 0))


def _q4_1(blocks_NBb: Tensor) -> QuantizedWeight:
    """Reads blocks of a scale, a smallest value, and 32 codes."""
    scales, least = _half(blocks_NBb, 0), _half(blocks_NBb, 2)
    return QuantizedWeight(4, _nibbles(blocks_NBb[..., 4:]), scales, least + 8 * scales)


def _q4_k(blocks_NBb: Tensor) -> QuantizedWeight:
    """Reads blocks of eight groups of 32 codes. Each group has a scale and a smallest value of 6 bits; the block has
    one scale for these scales and one for these values.
    """
    scale, least = _half(blocks_NBb, 0)[..., None], _half(blocks_NBb, 2)[..., None]
    low, high, rest = blocks_NBb[..., 4:8], blocks_NBb[..., 8:12], blocks_NBb[..., 12:16]
    scales = scale * torch.cat((low & 63, (rest & 15) | (low >> 6 << 4)), -1)
    leasts = least * torch.cat((high & 63, (rest >> 4) | (high >> 6 << 4)), -1)
    codes = _nibbles(blocks_NBb[..., 16:].unflatten(2, (4, 32)).flatten(1, 2))
    return QuantizedWeight(4, codes, scales.flatten(1), (8 * scales - leasts).flatten(1))


def _q6_k(blocks_NBb: Tensor) -> QuantizedWeight:
    """Reads blocks of sixteen groups of 16 codes, with scales of 8 bits. Codes are stored with 32 added, and the upper
    2 bits of a code apart from its lower 4.
    """
    lower = blocks_NBb[..., :128].unflatten(2, (2, 2, 32))  # two halves of 128 codes, 2 x 32 bytes each
    upper = blocks_NBb[..., 128:192].unflatten(2, (2, 1, 32))
    nibbles = torch.cat((lower & 15, lower >> 4), 3)  # [N, B, 2, 4, 32]
    bits = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    codes = (nibbles | bits << 4).to(torch.int8) - 32
    scales = _half(blocks_NBb, 208)[..., None] * blocks_NBb[..., 192:208].contiguous().view(torch.int8)
    return QuantizedWeight(8, codes.flatten(1), scales.flatten(1))


def _half(blocks_NBb: Tensor, at: int) -> Tensor:
    """Returns the float16 at byte `at` of each block, in float32 [N, B]."""
    return blocks_NBb[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(bytes_NBb: Tensor) -> Tensor:
    """Returns 4-bit codes minus 8 as int8 [N, K]. Each block gives first all its low nibbles, then all high ones."""
    codes = torch.cat((bytes_NBb & 15, bytes_NBb >> 4), -1).to(torch.int8)
    return codes.sub_(8).flatten(1)


_READERS: Mapping[str, Callable[[Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
