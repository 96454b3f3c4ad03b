"""The reference of quantised linears: what a weight's codes, scales, offsets and order of columns mean."""

from __future__ import annotations

import pytest
import torch

from raytide.kernels.core import QuantizedWeight
from raytide.kernels.ref import quantized_linear, rounded


def test_a_weight_is_its_codes_times_scales_plus_offsets_with_columns_put_back() -> None:
    codes = torch.tensor([[-8, 7, 1, 0]], dtype=torch.int8)
    order = torch.tensor([2, 0, 3, 1])
    weight = QuantizedWeight(4, codes, torch.tensor([[0.5, 2.0]]), torch.tensor([[1.0, -1.0]]), order)
    assert weight.group_size == 2
    assert weight.dequantized().tolist() == [[4.5, -1.0, -3.0, 1.0]]


@pytest.mark.parametrize("input_as", ["float", "int8"])
def test_a_product_is_that_of_the_dequantised_weight(input_as: str) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-128, 128, (24, 96), dtype=torch.int8)
    weight = QuantizedWeight(8, codes, torch.rand(24, 3), None, torch.randperm(96))
    x, bias = torch.randn(5, 96), torch.randn(24)
    used = x if input_as == "float" else rounded(x, weight.columns_K)
    torch.testing.assert_close(
        quantized_linear(weight, bias, input_as)(x),
        used @ weight.dequantized().t() + bias,  # type: ignore[arg-type]
    )


def test_inputs_are_rounded_in_groups_of_32_of_their_row() -> None:
    x = torch.zeros(2, 70)
    x[0, :32], x[0, 64], x[1, 3] = torch.arange(32.0), 0.01, -5.0
    got = rounded(x)
    assert (got - x).abs().amax() <= 31 / 254 + 1e-6
    assert got[0, 64] == pytest.approx(0.01) and got[1, 3] == pytest.approx(-5.0)
    assert not got[1, 32:].any()
