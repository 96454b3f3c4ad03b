"""Reads the weights of a Hugging Face directory that contains quantized modules. The format of each module is derived
from the module's tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from raytide.actors.models.loader import Weights
from raytide.actors.models.model_config import read_json
from raytide.actors.models.quantized.cutting import Block, Range, SplitsGroupError
from raytide.actors.models.quantized.integer_formats import read_awq, read_gptq, read_int8, read_packed
from raytide.actors.models.quantized.module_tensors import ModuleTensors
from raytide.actors.models.quantized.quantization_config import FP8_BLOCK, WeightScheme, read_quantization
from raytide.core.errors import DataError
from raytide.kernels.core import QuantizedWeight

Tensor = torch.Tensor

_MARKS = frozenset(
    {
        *("g_idx", "input_global_scale", "input_scale", "input_zero_point", "k_scale", "output_scale", "qweight"),
        *("qzeros", "scales", "v_scale", "weight_g_idx", "weight_global_scale", "weight_packed", "weight_scale"),
        *("weight_scale_inv", "weight_shape", "weight_zero_point"),
    }
)
"""The last parts of tensor names that only quantized modules have."""
_MOST_NAMED = 5
_SCALES = ("weight_scale", "weight_scale_inv")
"""The names of FP8's scales. Weights are multiplied by either: DeepSeek's `scale_inv` is the inverse of the number by
which weights were divided.
"""


def is_quantized(weights: Weights) -> bool:
    """Returns whether the directory has tensors of quantized modules, whatever its config says."""
    return any(name.rpartition(".")[2] in _MARKS for name in weights.names)


class QuantizedDirectory(Weights):
    """The tensors of a directory by name, as in `Weights`. For a quantized module, `get` returns the dequantized
    weight, and `quantized` returns the weight in quantized form.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device, *, maps: bool = True) -> None:
        super().__init__(model_dir, dtype, device, maps=maps)
        config = model_dir / "config.json"
        self._config = read_quantization(read_json(config), str(config))
        found = dict[str, set[str]]()
        for name in self.names:
            module, _, suffix = name.rpartition(".")
            found.setdefault(module, set()).add(suffix)
        self._modules = {
            module: ModuleTensors(self, module, frozenset(suffixes))
            for module, suffixes in found.items()
            if suffixes & _MARKS
        }
        self._formats = dict[str, WeightScheme]()

    def __contains__(self, name: str) -> bool:
        module, _, suffix = name.rpartition(".")
        return super().__contains__(name) or (suffix == "weight" and self._codes(module) in ("packed", "words"))

    def get(self, name: str, *shape: int) -> Tensor:
        module, _, suffix = name.rpartition(".")
        if suffix != "weight" or module not in self._modules:
            return super().get(name, *shape)
        return self._dequantized(module, shape, tuple((0, size) for size in shape))

    def block(self, name: str, shape: Sequence[int], where: tuple[slice, ...]) -> Tensor:
        module, _, suffix = name.rpartition(".")
        if suffix != "weight" or module not in self._modules:
            return super().block(name, shape, where)
        return self._dequantized(module, tuple(shape), tuple((each.start, each.stop) for each in where))

    def _read_into(self, target: Tensor, name: str) -> None:
        module, _, suffix = name.rpartition(".")
        if suffix != "weight" or module not in self._modules:
            super()._read_into(target, name)
        else:
            target.copy_(self.get(name, *target.shape))

    def _dequantized(self, module: str, shape: tuple[int, ...], where: tuple[Range, ...]) -> Tensor:
        """Returns a block of a weight, dequantized. Inputs outside the block are read only if the block cuts a group of
        inputs.
        """
        tensors = self._modules[module]
        if len(shape) != 2:
            raise DataError(f"{tensors.where} has {len(shape)} dimensions.", hint="Quantized weights have two.")
        (rows, columns), block = shape, Block(*where)
        if self._codes(module) == "float8":
            weight = read_float8(tensors, (rows, columns), self._config.fp8_block if self._config else FP8_BLOCK, block)
            self._note(tensors, WeightScheme("float", 8), columns)
            return weight.to(self._dtype)
        try:
            weight_NK = self.quantized_block(module, rows, columns, block)
        except SplitsGroupError:
            uncut = self.quantized_block(module, rows, columns, Block(block.outputs, (0, columns)))
            assert uncut is not None
            return uncut.dequantized()[:, block.columns].to(self._dtype)
        assert weight_NK is not None
        return weight_NK.dequantized().to(self._dtype)

    def quantized(self, module: str, rows: int, columns: int) -> QuantizedWeight | None:
        return self.quantized_block(module, rows, columns, Block((0, rows), (0, columns)))

    def quantized_block(self, module: str, rows: int, columns: int, block: Block) -> QuantizedWeight | None:
        tensors, codes = self._modules.get(module), self._codes(module)
        if tensors is None or codes == "float8":
            return None
        if codes == "int8":
            weight, groups = read_int8(tensors, rows, columns, block)
        elif codes == "packed":
            weight, groups = read_packed(tensors, rows, columns, block)
        elif codes == "words":
            weight, groups = self._words(tensors, rows, columns, block)
        else:
            tensors.check_only(("weight", "bias"))
            return None
        self._note(tensors, WeightScheme("int", weight.bits, columns // groups if groups > 1 else None), columns)
        return weight

    def check_all_read(self) -> None:
        if stray := sorted(self._modules.keys() - self._formats.keys()):
            raise DataError(
                f"{self.folder} has quantized modules that its architecture does not: "
                f"{', '.join(stray[:_MOST_NAMED])}.",
                hint="Scales of a quantized KV cache are not supported; else the directory mixes two models.",
            )

    @property
    def quantization(self) -> str:
        method = self._config.method if self._config else "quantized tensors"
        counts = Counter(map(str, self._formats.values()))
        return f"{method} {', '.join(name for name, _ in counts.most_common())}" if counts else ""

    def _words(self, tensors: ModuleTensors, rows: int, columns: int, block: Block) -> tuple[QuantizedWeight, int]:
        """Reads a module with `qweight`. The config must say if it is GPTQ's or AWQ's."""
        method = self._config.method if self._config else None
        if self._config is None or method not in ("gptq", "awq"):
            raise DataError(
                f"{tensors.where} has a qweight, but config.json does not say whether it is of gptq or awq.",
                hint="Put the quantization_config back into config.json.",
            )
        if method == "awq":
            return read_awq(tensors, rows, columns, block)
        less_one, symmetric = self._config.is_zero_less_one, self._config.is_symmetric
        return read_gptq(tensors, rows, columns, block, is_zero_less_one=less_one, is_symmetric=symmetric)

    def _codes(self, module: str) -> str | None:
        """Returns how a module stores its codes; None if it is not quantized, "stray" for scales without codes."""
        tensors = self._modules.get(module)
        if tensors is None:
            return None
        if "weight_packed" in tensors:
            return "packed"
        if "qweight" in tensors:
            return "words"
        dtype = tensors.dtype("weight") if "weight" in tensors else ""
        return {"I8": "int8", "F8_E4M3": "float8"}.get(dtype, "stray")

    def _note(self, tensors: ModuleTensors, found: WeightScheme, columns: int) -> None:
        if self._config is not None:
            self._config.check(tensors.module, found, columns, str(self.folder))
        self._formats[tensors.module] = found


def read_float8(tensors: ModuleTensors, shape: tuple[int, int], block: tuple[int, int], part: Block) -> Tensor:
    """Reads a block of a weight [N, K] that is stored in FP8 (e4m3). Returns the codes times their scale, in float32.
    There is one scale for the tensor, for each output, or for each block of outputs and inputs.

    The engine multiplies by this weight in the model's dtype, because integer codes cannot represent its values.
    """
    tensors.check_only(("weight", *_SCALES, "bias", "input_scale", "input_zero_point"))
    suffixes = [each for each in _SCALES if each in tensors]
    if len(suffixes) != 1:
        raise DataError(
            f"{tensors.where} is FP8 and has {' and '.join(suffixes) or 'no scale'}.",
            hint="Export or download the model again.",
        )
    (suffix,), (rows, columns) = suffixes, shape
    scale_shape = tensors.shape(suffix)
    scales = tensors.scales(suffix, *scale_shape)
    blocks = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    if (scale_shape == blocks and suffix == "weight_scale_inv") or scale_shape not in ((), (1,), (rows,), (rows, 1)):
        if scale_shape != blocks:
            raise DataError(
                f"{tensors.where}: {suffix} has shape {scale_shape}; blocks of {block[0]} x {block[1]} have {blocks}.",
                hint="The config's block size is another.",
            )
        for dim, own in enumerate((part.outputs, part.inputs)):
            index = torch.arange(*own).div(block[dim], rounding_mode="floor").to(scales.device)
            scales = scales.index_select(dim, index)
    elif scale_shape in ((rows,), (rows, 1)):
        scales = scales.view(rows, 1)[part.rows]
    weight_NK = tensors.integers("weight", rows, columns, dtype="F8_E4M3", where=(part.rows, part.columns)).float()
    if bool(weight_NK.isnan().any()):
        raise DataError(f"{tensors.where}.weight has numbers that are not finite.", hint="Quantize the model again.")
    return weight_NK.mul_(scales)
