"""Rounding a float weight to 8 or 4 bits."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from raytide.core.errors import ConfigError
from raytide.kernels.core import round_to_nearest


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [None, 24])
@pytest.mark.parametrize("bits", [4, 8])
def test_no_number_moves_by_more_than_half_a_step_but_the_largest(
    bits: Literal[4, 8], group: int | None, symmetric: bool
) -> None:
    weight = torch.randn(9, 72, generator=torch.Generator().manual_seed(0)) + 0.3
    rounded = round_to_nearest(weight, bits, group, symmetric)
    assert rounded.scales_NG.shape == (9, 3 if group else 1)
    assert (rounded.offsets_NG is None) is symmetric
    steps = rounded.scales_NG.repeat_interleave(rounded.group_size, 1)
    moved = (rounded.dequantized() - weight).abs() / steps
    assert moved.max() <= 0.5 + 1e-4 + 1e-4 * 2**bits


def test_a_symmetric_scale_lets_codes_reach_the_lowest_one() -> None:
    rounded = round_to_nearest(torch.tensor([[-255.0, 255.0, 0.0, 127.0]]), 8)
    assert rounded.codes_NK.tolist() == [[-128, 127, 0, 64]]
    assert rounded.scales_NG.item() == 2


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_stay_zeros(symmetric: bool) -> None:
    weight = torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 0.0, 2.0]])
    rounded = round_to_nearest(weight, 4, 2, symmetric).dequantized()
    assert torch.equal(rounded[weight == 0], weight[weight == 0])


def test_bad_weights_and_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups of 5"):
        round_to_nearest(torch.ones(2, 8), 8, 5)
    with pytest.raises(ConfigError, match="not finite"):
        round_to_nearest(torch.tensor([[1.0, float("nan")]]), 8)
