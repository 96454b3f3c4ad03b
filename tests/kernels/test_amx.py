"""The matrix product that a processor with AMX gets."""

from pathlib import Path

import pytest
import torch
from tests.kernels.test_compiled_operators import DTYPES, close, random

from raytide.kernels import amx, compiled, cpu, library, ref
from raytide.kernels.registry import ops_for

is_missing = library.compiler() is None or not cpu.can_pack()
needs_both = pytest.mark.skipif(is_missing, reason="no C compiler or no oneDNN here")


@needs_both
@pytest.mark.parametrize(("flags", "onednn_s", "c_s", "chosen"), [
    ("amx_tile amx_bf16", 1.0, 5.0, True),
    ("amx_tile amx_bf16", 1.0, 1.1, False),  # within the noise
    ("avx512_bf16", 1.0, 5.0, False),
])  # fmt: skip
def test_onednn_is_chosen_where_amx_makes_it_faster(
    flags: str, onednn_s: float, c_s: float, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([onednn_s, c_s])
    monkeypatch.setattr(Path, "read_text", lambda *_: flags)
    monkeypatch.setattr(amx, "_least_s", lambda *_: next(times))
    assert (ops_for("cpu").linear is amx.linear) is chosen
    assert ops_for("cpu", deterministic=True).linear is compiled.linear


@needs_both
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_the_references(dtype: torch.dtype) -> None:
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((5, 64), (48, 64), (48,)))
    torch.testing.assert_close(amx.linear(weight, bias)(x), ref.linear(weight, bias)(x), **close(dtype))
