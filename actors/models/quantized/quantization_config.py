"""Reads the `quantization_config` of a `config.json`: compressed-tensors, GPTQ, AWQ and FP8.

A module's tensors decide how the module is read. The config is checked against the tensors, and supplies only what
the tensors do not show (GPTQ's zero points). An unimplemented option that would change results raises a ConfigError
with the option's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field

from raytide.core.bounds import MOST_FILE_BYTES, shortened
from raytide.core.config import Config
from raytide.core.errors import ConfigError, DataError

QuantizationMethod = Literal["compressed-tensors", "gptq", "awq", "fp8"]

FP8_BLOCK = (128, 128)
"""The rows and columns of the blocks of a weight that share a scale, if an FP8 config names none."""

_FORMATS = ("dense", "float-quantized", "int-quantized", "mixed-precision", "naive-quantized", "pack-quantized")
_READ = "Supported: compressed-tensors (int, packed int, float), gptq, awq (GEMM), fp8, and GGUF files."


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The number format of quantized weights. If `group_size` is None, there is one scale for each output, or for each
    block, or for the whole tensor.
    """

    kind: Literal["int", "float"]
    bits: int
    group_size: int | None = None
    block: tuple[int, int] | None = None

    def __str__(self) -> str:
        name = f"{self.kind}{self.bits}" if self.kind == "int" else f"fp{self.bits}"
        if self.block is not None:
            return f"{name} {self.block[0]}x{self.block[1]}"
        return f"{name} g{self.group_size}" if self.group_size else name


@dataclass(frozen=True, slots=True)
class Quantization:
    """A model's quantization as its config states it: the method and the schemes. Each quantized module has one of the
    schemes.
    """

    method: QuantizationMethod
    schemes: tuple[WeightScheme, ...]
    is_zero_less_one: bool = False
    """True for GPTQ's first format, which stores each zero point minus one."""
    is_symmetric: bool = False
    """True for GPTQ's symmetric weights: all zero points are the middle code."""

    @property
    def fp8_block(self) -> tuple[int, int]:
        return next((each.block for each in self.schemes if each.block is not None), FP8_BLOCK)

    def check(self, module: str, found: WeightScheme, columns: int, where: str) -> None:
        """Raises DataError if no scheme of the config agrees with `found`, the scheme of a module's tensors. The module
        has `columns` inputs.
        """
        if not any(_agree(found, each, columns) for each in self.schemes):
            expected = ", ".join(dict.fromkeys(map(str, self.schemes)))
            raise DataError(
                f"{where}: the tensors of {module} are {found}, config.json says {expected or 'nothing'}.",
                hint="The directory mixes two models; export it again.",
            )


def _agree(found: WeightScheme, stated: WeightScheme, columns: int) -> bool:
    """Returns whether a found scheme is the stated one. A group of all columns equals one scale for each output."""
    return (found.kind, found.bits) == (stated.kind, stated.bits) and (
        found.kind == "float" or (found.group_size or columns) == (stated.group_size or columns)
    )


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Returns the quantization that a `config.json` states, or None if it states none. Raises ConfigError if the
    quantization is not supported.
    """
    body = config.get("quantization_config")
    if body is None:
        body = config.get("compression_config")  # the name that compressed-tensors had for it at first
    if body is None:
        return None
    where = f"{where}: quantization_config"
    if not isinstance(body, Mapping):
        raise DataError(f"{where} is no object.", hint="Export or download the model again.")
    method = str(body.get("quant_method", ""))
    reader = _METHODS.get(method)
    if reader is None:
        named = f"of method {shortened(method, 100)}" if method else "without quant_method"
        raise ConfigError(f"{where}: quantized weights {named} are not supported.", hint=_READ)
    return reader(body, where)


class _Args(Config):
    """The fields of compressed-tensors' `QuantizationArgs`."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: list[int] | str | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: dict[str, Any] | None = None

    def scheme(self, where: str) -> WeightScheme:
        kind = self.type.lower()
        if kind == "int" and self.num_bits in (4, 8):
            return WeightScheme("int", self.num_bits, self.group_size if (self.group_size or 0) > 0 else None)
        if kind == "float" and self.num_bits == 8:
            return WeightScheme("float", 8, None, self._block(where))
        raise ConfigError(
            f"{where}: weights of {self.num_bits} bits of type {shortened(kind, 20)} are not supported.",
            hint="Supported: int of 4 or 8 bits, float of 8.",
        )

    def _block(self, where: str) -> tuple[int, int] | None:
        given = self.block_structure
        if given is None:
            return None
        parts = given.split("x") if isinstance(given, str) else [str(each) for each in given]
        return _block(parts, where)


class _Scheme(Config):
    """The fields of compressed-tensors' `QuantizationScheme`."""

    targets: list[str]
    weights: _Args | None = None
    input_activations: _Args | None = None
    output_activations: _Args | None = None
    format: str | None = None


class _CompressedTensors(Config):
    """compressed-tensors' `QuantizationConfig`, with the fields that transformers adds."""

    most_bytes = MOST_FILE_BYTES

    quant_method: str
    config_groups: dict[str, _Scheme] = Field(default_factory=dict)
    format: str = "dense"
    ignore: list[str] | None = None
    kv_cache_scheme: _Args | None = None
    quantization_status: str | None = None
    global_compression_ratio: float | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    version: str | None = None
    run_compressed: bool | None = None


def _compressed_tensors(body: Mapping[str, Any], where: str) -> Quantization:
    config = _CompressedTensors.parse(body, where=where)
    sparse = config.sparsity_config or {}
    reasons = {
        "transform_config (rotations of the activations)": bool(config.transform_config),
        "sparsity_config": bool(sparse) and sparse.get("format", "dense") != "dense",
        "kv_cache_scheme (a quantized KV cache)": config.kv_cache_scheme is not None,
    }
    for name, group in config.config_groups.items():
        reasons[f"output_activations of {shortened(name, 50)}"] = group.output_activations is not None
        reasons[f"{shortened(name, 50)}, a group without weights,"] = group.weights is None
    for form in (config.format, *(group.format for group in config.config_groups.values())):
        reasons[f"format {shortened(str(form), 50)}"] = form is not None and form not in _FORMATS
    for what, is_there in reasons.items():
        if is_there:
            raise ConfigError(f"{where}: {what} is not supported.", hint=_READ)
    args = [group.weights for group in config.config_groups.values() if group.weights is not None]
    return Quantization("compressed-tensors", tuple(each.scheme(where) for each in args))


class _Lenient(Config):
    """The config of a method whose writers add their own fields about the calibration."""

    model_config = ConfigDict(extra="ignore")
    most_bytes = MOST_FILE_BYTES

    quant_method: str
    bits: int = 8
    group_size: int = -1

    def scheme(self, where: str, *bits: int) -> WeightScheme:
        if self.bits not in bits:
            allowed = " or ".join(map(str, bits))
            raise ConfigError(f"{where}: {self.bits} bits are not supported.", hint=f"Supported: {allowed}.")
        return WeightScheme("int", self.bits, self.group_size if self.group_size > 0 else None)


class _Gptq(_Lenient):
    checkpoint_format: str | None = None
    dynamic: dict[str, Any] | None = None
    rotation: Any = None
    is_marlin_format: bool = False
    sym: bool | None = None


class _Awq(_Lenient):
    bits: int = 4
    version: str = "gemm"
    zero_point: bool = True


class _Fp8(_Lenient):
    fmt: str | None = None
    weight_block_size: list[int] | None = None


def _gptq(body: Mapping[str, Any], where: str) -> Quantization:
    config = _Gptq.parse(body, where=where)
    form = "marlin" if config.is_marlin_format else config.checkpoint_format or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise ConfigError(
            f"{where}: checkpoint_format {shortened(form, 50)} is not supported.", hint="Supported: gptq, gptq_v2."
        )
    for what, value in {"dynamic (bits by module)": config.dynamic, "rotation": config.rotation}.items():
        if value:
            raise ConfigError(f"{where}: {what} is not supported.", hint="Quantize all modules alike.")
    schemes = (config.scheme(where, 4, 8),)
    return Quantization("gptq", schemes, is_zero_less_one=form == "gptq", is_symmetric=bool(config.sym))


def _awq(body: Mapping[str, Any], where: str) -> Quantization:
    config = _Awq.parse({**body, "bits": body.get("bits", body.get("w_bit", 4))}, where=where)
    if config.version.lower() != "gemm":
        raise ConfigError(
            f"{where}: AWQ of version {shortened(config.version, 50)} is not supported.", hint="Supported: gemm."
        )
    return Quantization("awq", (config.scheme(where, 4),))


def _fp8(body: Mapping[str, Any], where: str) -> Quantization:
    config = _Fp8.parse(body, where=where)
    if config.fmt not in (None, "e4m3"):
        raise ConfigError(f"{where}: fmt {shortened(config.fmt, 50)} is not supported.", hint="Supported: e4m3.")
    block = None if config.weight_block_size is None else _block(list(map(str, config.weight_block_size)), where)
    return Quantization("fp8", (WeightScheme("float", 8, None, block),))


def _block(parts: list[str], where: str) -> tuple[int, int]:
    if len(parts) != 2 or not all(each.isdecimal() and 0 < int(each) <= 1 << 20 for each in map(str.strip, parts)):
        raise ConfigError(f"{where}: a block is two positive numbers.", hint="Such as [128, 128].")
    rows, columns = map(int, parts)
    return rows, columns


_METHODS: Mapping[str, Callable[[Mapping[str, Any], str], Quantization]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
}
