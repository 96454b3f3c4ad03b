"""The resources that each kernel needs of a GPU, found by compiling ahead of time, without a GPU or driver.

`PYTHONPATH=. python tests/kernels/triton/resources.py` writes the table of docs/gpu-kernels.md, and a test holds it.

The operators themselves are called, with tensors of a common model's shapes on the CPU; their launches are recorded and
compiled, so that the table is that of the tiles which the operators choose.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from tests.kernels.paged import paged_batch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from raytide.kernels.core import AttentionSpec, HeadNorms, LinearInput, NormWeights, QuantizedWeight, Rope
from raytide.kernels.triton import attention, feed_forward, norm, quantized_linear, rope_write

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "gpu-kernels.md"
MARK = "<!-- written by tests/kernels/triton/resources.py -->\n"

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, as an operator made it."""

    kernel: Any
    values: tuple[object, ...]
    named: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """The needs of a program. `spilled` are bytes of registers in memory (CUDA) or spilled registers (ROCm)."""

    registers: int
    shared_bytes: int
    spilled: int
    matrix_instructions: int


def recorded(operator: Callable[[], object], is_hip: bool) -> list[Launch]:
    """Returns the launches that an operator makes on a GPU of 108 multiprocessors."""
    launches: list[Launch] = []
    with patch.object(torch.version, "hip", "6" if is_hip else None), _recording(launches):
        operator()
    return launches


@contextmanager
def _recording(launches: list[Launch]) -> Iterator[None]:
    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *values, **named: launches.append(Launch(self.kernel, values, named))

    patches = [patch.object(module, "num_processors", lambda device: 108) for module in (attention, quantized_linear)]
    for module in (attention, feed_forward, norm, quantized_linear, rope_write):
        kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
        patches += [patch.object(module, name, Recorder(value)) for name, value in kernels.items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def compiled(launch: Launch, target: GPUTarget) -> Resources:
    """Compiles a launch as Triton's own launcher would, its arguments' alignment and all."""
    kernel = launch.kernel
    named = {name: value for name, value in launch.named.items() if name not in _OPTIONS}
    options = {name: value for name, value in launch.named.items() if name in _OPTIONS}
    values = dict(zip(kernel.arg_names, launch.values, strict=False)) | named
    types, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        specializes = not parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and specializes):
            types[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            types[parameter.name] = "i32"
            if specializes and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            types[parameter.name] = "fp32"
    built = triton.compile(ASTSource(kernel, types, constants, attributes), target=target, options=options)
    return (_of_amd if target.backend == "hip" else _of_nvidia)(built)


def _of_nvidia(built: Any) -> Resources:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    matrix = len(re.findall(r"mma\.sync|wgmma\.mma_async", built.asm["ptx"]))
    return Resources(used["REG"], built.metadata.shared, used["STACK"] + used["LOCAL"], matrix)


def _of_amd(built: Any) -> Resources:
    text = built.asm["amdgcn"]
    used = {name: int(number) for name, number in re.findall(r"\.([vs]gpr_(?:spill_)?count): +(\d+)", text)}
    spilled = used["vgpr_spill_count"] + used["sgpr_spill_count"]
    return Resources(used["vgpr_count"], built.metadata.shared, spilled, len(re.findall(r"v_s?mfma", text)))


def _random(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def _attention(queries: int, contexts: int, heads: int, dim: int, spec: AttentionSpec) -> None:
    batch = paged_batch([queries] * 2, [contexts] * 2, 16)
    q, cache = _random(2 * queries, heads, dim), _random(2, 2 * contexts, 8, dim)
    attention.attention(batch, spec)(q, cache)


def _linear(bits: int, rows: int, input_as: LinearInput, has_offsets: bool) -> None:
    size, groups = 4096, 32
    offsets = torch.zeros(size, groups) if has_offsets else None
    codes = torch.zeros(size, size, dtype=torch.int8)
    weight = QuantizedWeight(bits, codes, torch.zeros(size, groups), offsets)  # type: ignore[arg-type]
    quantized_linear.quantized_linear(weight, None, input_as)(_random(rows, size))


def _rope_write() -> None:
    rope, norms = Rope(_random(4, 128), _random(4, 128)), HeadNorms(_random(128), _random(128), 1e-6)
    rope_write.rope_write(_random(4, 48, 128), rope, norms, _random(2, 64, 8, 128), torch.zeros(4, dtype=torch.int64))


def _add_norm() -> None:
    norm.add_norm(_random(4, 4096), _random(4, 4096), NormWeights(_random(4096), None, 1e-6))


def _activate_mul() -> None:
    feed_forward.activate_mul(_random(4, 2 * 14336), "silu")


OPERATORS: dict[str, Callable[[], None]] = {
    "attention, one new token, 32 of 8 heads": lambda: _attention(1, 4096, 32, 128, AttentionSpec(0.09)),
    "attention, prefill": lambda: _attention(512, 1024, 32, 128, AttentionSpec(0.09)),
    "attention, prefill, heads of 256, window, soft cap": lambda: _attention(
        512, 1024, 16, 256, AttentionSpec(0.06, 512, 50.0)
    ),
    "4-bit linear, one row": lambda: _linear(4, 1, "float", True),
    "4-bit linear, 16 rows, offsets": lambda: _linear(4, 16, "float", True),
    "4-bit linear, 512 rows": lambda: _linear(4, 512, "float", False),
    "8-bit linear, 512 rows": lambda: _linear(8, 512, "float", False),
    "8-bit linear, 512 rows, int8 inputs": lambda: _linear(8, 512, "int8", False),
    "head norms, rotation, KV write": _rope_write,
    "add, norm": _add_norm,
    "silu(gate) * up": _activate_mul,
}


def measured() -> dict[tuple[str, str, str], Resources]:
    """Returns the resources by operator, kernel and target."""
    found = {}
    for name, operator in OPERATORS.items():
        for target_name, target in TARGETS.items():
            for launch in recorded(operator, target.backend == "hip"):
                found[name, launch.kernel.__name__, target_name] = compiled(launch, target)
    return found


def table(found: dict[tuple[str, str, str], Resources]) -> str:
    """Returns the table as Markdown."""
    lines = [
        f"Triton {triton.__version__}: registers of a thread, shared memory in bytes, matrix instructions in the code.",
        "",
        "| operator | kernel | " + " | ".join(TARGETS) + " |",
        "|---|---|" + "---|" * len(TARGETS),
    ]
    for name, kernel in dict.fromkeys((name, kernel) for name, kernel, _ in found):
        cells = [found[name, kernel, target] for target in TARGETS]
        texts = [f"{each.registers}, {each.shared_bytes:,}, {each.matrix_instructions}" for each in cells]
        lines.append(f"| {name} | {kernel.removesuffix('_kernel')} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    PAGE.write_text(PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "\n" + table(measured()))
