"""Quantised linears in C: with int8 inputs the exact reference to the bit, with float ones the dequantised product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_compiled_operators import DTYPES, random

from raytide.kernels import invariant, quantized
from raytide.kernels.core import LinearInput, QuantizedWeight, round_to_nearest
from raytide.kernels.library import compiler, library

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler here")

GROUP_SIZES = [1, 7, 16, 24, 31, 32, 33, 64, 96, 128]


@st.composite
def weights(draw: st.DrawFn) -> QuantizedWeight:
    """Codes of every kind, the lowest among them or alone, in groups that fit 32 or do not; scales of every kind, those
    that float16 has, below its normal ones too, and others."""
    bits = draw(st.sampled_from([4, 8]))
    size, groups = draw(st.sampled_from(GROUP_SIZES)), draw(st.sampled_from([1, 1, 2, 5]))
    outputs, width = draw(st.sampled_from([1, 15, 16, 33, 75])), groups * size
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    lowest = -(2 ** (bits - 1))
    highest = draw(st.sampled_from([-lowest, lowest + 1]))
    scales = torch.rand(outputs, groups, generator=generator) * draw(st.sampled_from([0.01, -0.01, 1e-5]))
    return QuantizedWeight(
        bits,  # type: ignore[arg-type]
        torch.randint(lowest, highest, (outputs, width), dtype=torch.int8, generator=generator),
        scales.half().float() if draw(st.booleans()) else scales,
        torch.randn(outputs, groups, generator=generator) * 0.01 if draw(st.booleans()) else None,
        torch.randperm(width, generator=generator) if draw(st.booleans()) else None,
    )


def inputs(rows: int, width: int, dtype: torch.dtype, are_equal: bool) -> torch.Tensor:
    """Equal ones of full size make the largest sums."""
    x = random(rows, width, dtype=dtype, seed=rows)
    return x.abs().amax().expand(rows, width).contiguous() if are_equal else x


def check(weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    exact = invariant.quantized_linear(weight, bias, "int8")(x)
    assert torch.equal(quantized.quantized_linear(weight, bias, "int8")(x), exact)
    got = quantized.quantized_linear(weight, bias, "float")(x)
    weight_NK, x_TK = weight.dequantized().double(), x.double()
    codes_NK, scales_NG = weight.codes_NK.short().abs(), weight.scales_NG.abs()
    parts = replace(weight, codes_NK=codes_NK, scales_NG=scales_NG, offsets_NG=_amount(weight.offsets_NG))
    amounts = x_TK.abs() @ parts.dequantized().double().t() + 1  # sums may cancel, their rounding does not
    oracle = x_TK @ weight_NK.t() + (0 if bias is None else bias.double())
    close = 1e-5 if x.dtype == torch.float32 else 4e-3
    assert ((got.double() - oracle).abs() <= close * amounts + close * oracle.abs()).all()


def _amount(numbers: torch.Tensor | None) -> torch.Tensor | None:
    return None if numbers is None else numbers.abs()


@settings(max_examples=100, deadline=None)
@given(
    weight=weights(),
    rows=st.sampled_from([1, 2, 3, 5, 8, 9, 17, 64, 130]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    are_equal=st.booleans(),
)
def test_products_are_the_exact_ones(
    weight: QuantizedWeight, rows: int, dtype: torch.dtype, biased: bool, are_equal: bool
) -> None:
    outputs, width = weight.codes_NK.shape
    check(weight, inputs(rows, width, dtype, are_equal), random(outputs, dtype=dtype) if biased else None)


@pytest.mark.parametrize("input_as", ["float", "int8"])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_do_not_depend_on_their_batch_nor_on_threads(bits: int, input_as: LinearInput) -> None:
    weight = round_to_nearest(random(100, 192, dtype=torch.float32), bits, 64)  # type: ignore[arg-type]
    apply, x = quantized.quantized_linear(weight, None, input_as), random(130, 192, dtype=torch.bfloat16)
    loaded = library()
    assert loaded is not None
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            loaded.use_threads(threads)
            results.append(apply(x))
    finally:
        loaded.use_threads(before)
    assert torch.equal(*results)
    for rows in (1, 2, 15, 64):
        assert torch.equal(apply(x[:rows]), results[0][:rows])
        assert torch.equal(apply(x[-rows:]), results[0][-rows:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("input_as", ["float", "int8"])
def test_a_row_with_a_number_that_is_not_finite_gives_none_that_is(bad: float, input_as: LinearInput) -> None:
    weight = round_to_nearest(random(20, 64, dtype=torch.float32), 8)
    x = random(3, 64, dtype=torch.float32)
    x[1, 40] = bad
    got = quantized.quantized_linear(weight, None, input_as)(x)
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()


def test_inputs_too_small_for_a_scale_of_their_own_are_rounded_as_in_the_reference() -> None:
    weight = round_to_nearest(random(20, 64, dtype=torch.float32), 8)
    x = torch.zeros(4, 64)
    x[1], x[2], x[3, 5] = 190 * 2.0**-149, 60 * 2.0**-149, 1e30
    check(weight, x, None)


def test_leading_dimensions_and_other_dtypes_are_kept() -> None:
    weight = round_to_nearest(random(20, 64, dtype=torch.float32), 4, 32)
    x = random(2, 3, 64, dtype=torch.float16)
    for input_as in ("float", "int8"):
        apply = quantized.quantized_linear(weight, None, input_as)
        assert apply(x).shape == (2, 3, 20) and apply(x).dtype == torch.float16
        assert torch.equal(apply(x)[1, 2], apply(x[1, 2:])[0])
        assert apply(x[:0]).shape == (0, 3, 20)
