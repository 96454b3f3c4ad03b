"""Quantised linears built for processors with fewer instructions than this one, or with more, emulated by SIMDe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.kernels.test_other_processors import has
from tests.kernels.test_quantized_operators import check, inputs

from raytide.kernels import compiled, library
from raytide.kernels.core import QuantizedWeight

V4 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# The compilers' flags, the instructions of /proc/cpuinfo that they need, and what the library calls them.
PROCESSORS = {
    "baseline": (["-march=x86-64"], set[str](), "128-bit vectors"),
    "AVX2": (["-march=x86-64-v3"], {"avx2", "fma"}, "AVX2"),
    "AVX-VNNI": (["-march=x86-64-v3", "-mavxvnni"], {"avx2", "fma", "avx_vnni"}, "AVX2, VNNI"),
    "AVX512": (["-march=x86-64-v4"], V4, "AVX512"),
    "AVX512-VNNI": (["-march=x86-64-v4", "-mavx512vnni"], V4 | {"avx512_vnni"}, "AVX512, VNNI"),
    "AMX": (
        ["-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
        V4 | {"avx512_vnni", "amx_tile", "amx_int8"},
        "AVX512, VNNI, AMX",
    ),
    "emulated-AVX512": (["-march=x86-64-v3"], {"avx2", "fma"}, "AVX512"),
    "emulated-AVX512-VNNI": (["-march=x86-64-v3", "-DEMULATE_VNNI"], {"avx2", "fma"}, "AVX512, VNNI"),
}
INCLUDES = [Path(sys.prefix) / "tools" / "usr" / "include", Path("/usr/include")]
"""The folders that can have SIMDe; `./dev setup` unpacks it into the first."""
UNITS = ["quantized.c", "parallel.c"]


@pytest.fixture(params=PROCESSORS, scope="module")
def processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Builds the quantised linears alone for the processor, and uses them."""
    (flags, needed, names), level = PROCESSORS[request.param], "-O1"
    folders = [folder for folder in INCLUDES if (folder / "simde" / "x86" / "avx512.h").exists()]
    if library.compiler() is None or not has(needed):
        pytest.skip("cannot be built or run here")
    if request.param.startswith("emulated"):
        if not folders:
            pytest.skip("no SIMDe here (Debian: libsimde-dev)")
        header = Path(__file__).with_name("emulated_avx512.h")
        flags = [*flags, "-Wno-psabi", f"-I{folders[0]}", "-include", str(header)]
        level = "-O0"  # a compiler that optimises what SIMDe makes of them takes half a minute
    folder = tmp_path_factory.mktemp("c")
    for source in library._SOURCES.glob("*.[ch]"):
        if source.suffix == ".h" or source.name in UNITS:
            (folder / source.name).symlink_to(source.resolve())
    others = [flag for flag in library._FLAGS if flag not in ("-march=native", "-O3")]
    exported = {"threads", "instructions", "quantized_bytes", "pack_quantized", "quantized_linear"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_SOURCES", folder)
        patch.setattr(library, "_FLAGS", (level, *flags, *others))
        patch.setattr(library, "_SIGNATURES", {name: library._SIGNATURES[name] for name in exported})
        built = library.Library(library.build(tmp_path_factory.mktemp("kernels")))
        patch.setattr(compiled, "loaded_library", lambda: built)
        assert built.instructions().decode() == names
        yield


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("are_equal", [False, True])
def test_products_are_the_exact_ones(bits: int, are_equal: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    lowest = -(2 ** (bits - 1))
    for size, groups in ((32, 5), (128, 2), (24, 3), (200, 1)):
        codes = torch.randint(lowest, -lowest, (75, size * groups), dtype=torch.int8, generator=generator)
        codes[:20] = lowest
        scales, offsets = torch.rand(75, groups), torch.randn(75, groups) if groups == 2 else None
        if groups != 5:  # scales that float16 has, below its normal ones too
            scales[::2] *= 1e-5
            scales = scales.half().float()
        columns = torch.randperm(size * groups) if groups == 3 else None
        weight = QuantizedWeight(bits, codes, scales, offsets, columns)  # type: ignore[arg-type]
        for rows in (1, 2, 7, 40):
            check(weight, inputs(rows, size * groups, torch.float32, are_equal), None)
