"""The C operators built for processors with fewer instructions than this one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.kernels.paged import num_slots, paged_batch
from tests.kernels.test_compiled_operators import DTYPES, close, random

from raytide.kernels import compiled, library, ref
from raytide.kernels.core import AttentionSpec

# What gcc and clang call them, and the instructions of /proc/cpuinfo that they need.
PROCESSORS = {"x86-64-v3": {"avx2", "fma"}, "x86-64-v4": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}}


def has(instructions: set[str]) -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and instructions <= set(info.read_text().split())


@pytest.fixture(scope="module", params=PROCESSORS)
def lib(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[library.Library]:
    if library.compiler() is None or not has(PROCESSORS[request.param]):
        pytest.skip("cannot be built or run here")
    with pytest.MonkeyPatch.context() as patch:
        flags = (f"-march={request.param}" if flag == "-march=native" else flag for flag in library._FLAGS)
        patch.setattr(library, "_FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in flags))
        built = library.Library(library.build(tmp_path_factory.mktemp("kernels")))
        patch.setattr(compiled, "loaded_library", lambda: built)
        yield built


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_the_references(lib: library.Library, dtype: torch.dtype) -> None:
    weight, bias = random(75, 90, dtype=dtype) * 0.1, random(75, dtype=dtype)
    apply = compiled.linear(weight, bias)
    for rows in (1, 3, 6, 14, 40):
        x = random(rows, 90, dtype=dtype, seed=rows)
        torch.testing.assert_close(apply(x), ref.linear(weight, bias)(x), **close(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("operator", [compiled.attention, compiled.invariant_attention])
@pytest.mark.parametrize("is_int8", [False, True])
def test_attention_is_the_references(
    lib: library.Library,
    dtype: torch.dtype,
    dim: int,
    operator: Callable[..., Callable[..., torch.Tensor]],
    is_int8: bool,
) -> None:
    batch, spec = paged_batch([1, 20, 1, 1], [150, 90, 1, 64], 8), AttentionSpec(dim**-0.5, window=70, softcap=9.0)
    cache, q = random(2, num_slots(batch), 2, dim, dtype=dtype), random(23, 6, dim, dtype=dtype)
    cache = ref.rounded_heads(cache) if is_int8 else cache
    torch.testing.assert_close(operator(batch, spec)(q, cache), ref.attention(batch, spec)(q, cache), **close(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_the_references(lib: library.Library, dtype: torch.dtype) -> None:
    x = 20 * random(5, 66, dtype=dtype)
    for kind in ("silu", "gelu", "gelu_tanh"):
        torch.testing.assert_close(compiled.activate_mul(x, kind), ref.activate_mul(x, kind), **close(dtype))
