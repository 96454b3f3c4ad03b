"""Attention against its definition, with every window and cap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raytide.actors.trainer.model.attention import attend, flex
from raytide.kernels.core import AttentionSpec


def by_definition(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    out = torch.zeros_like(q)
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            for at in range(q.shape[2]):
                end = at + offset + 1
                start = 0 if spec.window is None else max(0, end - spec.window)
                scores = k[batch, head // group, start:end] @ q[batch, head, at] * spec.scale
                scores = scores if spec.softcap is None else spec.softcap * torch.tanh(scores / spec.softcap)
                out[batch, head, at] = scores.softmax(0) @ v[batch, head // group, start:end]
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("length", [12, 5])
def test_every_kernel_does_what_attention_is(window: int | None, softcap: float | None, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, length, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)
    spec = AttentionSpec(0.3, window, softcap)
    wanted = by_definition(q, k, v, spec)
    assert torch.allclose(attend(q, k, v, spec), wanted, atol=1e-5)
    with torch.no_grad():  # what a GPU runs compiled; on a CPU it has no backward
        assert torch.allclose(flex(q, k, v, spec), wanted, atol=1e-5)
