"""The chunked loss is the plain one, gradients and all, and never holds all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.trainer.live_bytes import LiveBytes
from torch import Tensor

from raytide.actors.trainer.model.loss import IGNORE, loss_sum


def grads_of(
    chunk: int, cap: float | None, dtype: torch.dtype, rows: int, ignored: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(1, rows, 16, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()
    head = torch.randn(50, 16, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()
    targets = torch.randint(50, (1, rows), generator=generator)
    targets[0, :ignored] = IGNORE
    loss = loss_sum(x, head, targets, cap, chunk=chunk)
    (loss * 0.25).backward()
    assert x.grad is not None and head.grad is not None
    return loss.detach(), x.grad, head.grad


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 40), st.sampled_from([None, 5.0]))
def test_chunks_of_any_size_give_loss_and_gradients(rows: int, chunk: int, ignored: int, cap: float | None) -> None:
    for got, wanted in zip(
        grads_of(chunk, cap, torch.float32, rows, min(rows, ignored)),
        grads_of(0, cap, torch.float32, rows, min(rows, ignored)),
        strict=True,
    ):
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_bf16_gradients_are_summed_in_fp32() -> None:
    exact = grads_of(0, None, torch.float32, 512, 0)[2]
    chunked, plain = grads_of(4, None, torch.bfloat16, 512, 0)[2], grads_of(0, None, torch.bfloat16, 512, 0)[2]
    assert (chunked.float() - exact).norm() <= 1.5 * (plain.float() - exact).norm()


def test_a_sum_that_fp16_cannot_hold_is_scaled_first() -> None:
    """As trainers do: the loss is divided by its tokens. All tokens have one target, so that gradients add up."""
    x = torch.full((1, 8192, 16), 30.0, dtype=torch.float16)
    targets = torch.zeros(1, 8192, dtype=torch.long)
    grads = []
    for chunk in (0, 4096):
        head = torch.zeros(50, 16, dtype=torch.float16, requires_grad=True)
        (loss_sum(x, head, targets, chunk=chunk) / 8192).backward()
        assert head.grad is not None
        grads.append(head.grad)
    assert grads[1].isfinite().all()
    assert torch.allclose(grads[0], grads[1], rtol=1e-2)


@pytest.mark.parametrize("needs", ["x", "head", "neither"])
def test_what_needs_no_gradient_gets_none(needs: str) -> None:
    x = torch.randn(1, 6, 8, requires_grad=needs == "x")
    head = torch.randn(9, 8, requires_grad=needs == "head")
    loss = loss_sum(x, head, torch.arange(6)[None], chunk=2)
    if needs != "neither":
        loss.backward()
    assert (x.grad is None, head.grad is None) == (needs != "x", needs != "head")


def test_all_logits_never_exist_at_once() -> None:
    x, head = torch.randn(1, 1024, 8, requires_grad=True), torch.randn(2000, 8, requires_grad=True)
    peaks = {}
    for chunk in (0, 64):
        with LiveBytes() as live:
            loss_sum(x, head, torch.zeros(1, 1024, dtype=torch.int64), chunk=chunk).backward()
        peaks[chunk] = live
    assert peaks[64].largest < 64 * 2000 * 4 + 1
    assert peaks[64].peak < 0.15 * peaks[0].peak
