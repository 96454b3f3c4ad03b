"""Operators of a deterministic engine: a row's result is the same to the bit alone, in any batch and however its
prompt is cut.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.paged import num_slots, paged_batch
from tests.kernels.test_compiled_operators import DTYPES, random

from raytide.kernels.core import AttentionSpec, HeadNorms, NormWeights, Rope
from raytide.kernels.registry import Ops, ops_for

BACKENDS = {"cpu": ops_for("cpu", deterministic=True), "torch": ops_for("abacus", deterministic=True)}

parametrized = pytest.mark.parametrize("ops", BACKENDS.values(), ids=BACKENDS)


@parametrized
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 5, 15, 64, 130])
def test_rows_of_products_norms_and_activations(ops: Ops, dtype: torch.dtype, rows: int) -> None:
    x, delta = random(rows, 192, dtype=dtype), random(rows, 192, dtype=dtype, seed=1)
    weight, bias = random(100, 192, dtype=dtype, seed=2), random(100, dtype=dtype, seed=3)
    apply, by = ops.linear(weight, bias), NormWeights(random(192, dtype=dtype, seed=4), None, 1e-5)
    together = apply(x), ops.norm(x, by), ops.add_norm(x.clone(), delta, by), ops.activate_mul(x, "silu")
    for row in range(rows):
        at = slice(row, row + 1)
        alone = (
            apply(x[at]),
            ops.norm(x[at], by),
            ops.add_norm(x[at].clone(), delta[at], by),
            ops.activate_mul(x[at], "silu"),
        )
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one, many[at])


@parametrized
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 9, 63])
def test_rows_of_products_of_an_odd_number_of_inputs(ops: Ops, dtype: torch.dtype, width: int) -> None:
    """The second product of an adapter of an odd rank is one."""
    x, weight = random(130, width, dtype=dtype), random(192, width, dtype=dtype, seed=1)
    for bias in (None, random(192, dtype=dtype, seed=2)):
        apply = ops.linear(weight, bias)
        assert torch.equal(torch.cat([apply(row) for row in x.split(1)]), apply(x))


@parametrized
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_heads_that_are_wider_than_the_c_code_takes(ops: Ops, dtype: torch.dtype) -> None:
    batch, spec, dim = paged_batch([40], [40], 16), AttentionSpec(scale=0.05), 320
    cache, q = random(2, num_slots(batch), 2, dim, dtype=dtype), random(40, 4, dim, dtype=dtype, seed=1)
    together = ops.attention(batch, spec)(q, cache)
    for at in range(40):
        batch.query_lens, batch.context_lens = [1], [at + 1]
        assert torch.equal(ops.attention(batch, spec)(q[at : at + 1], cache)[0], together[at])


@parametrized
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_experts_and_of_the_rotation(ops: Ops, dtype: torch.dtype) -> None:
    x, chosen = random(9, 32, dtype=dtype), torch.randint(3, (9, 2), generator=torch.Generator().manual_seed(0))
    apply = ops.experts(random(3, 96, 32, dtype=dtype), random(3, 32, 48, dtype=dtype), "silu")
    weights = random(9, 2, dtype=dtype).softmax(-1)
    qkv, cos, sin = (random(9, *shape, dtype=dtype) for shape in ((4, 80), (80,), (80,)))
    norms = HeadNorms(random(80, dtype=dtype), random(80, dtype=dtype), 1e-6)
    together, turned = apply(x, chosen, weights), qkv.clone()
    ops.rope_write(turned, Rope(cos, sin), norms, torch.zeros(2, 9, 1, 80, dtype=dtype), torch.arange(9))
    for row in range(9):
        at = slice(row, row + 1)
        assert torch.equal(apply(x[at], chosen[at], weights[at]), together[at])
        alone = qkv[at].clone()
        ops.rope_write(
            alone, Rope(cos[at], sin[at]), norms, torch.zeros(2, 9, 1, 80, dtype=dtype), torch.arange(row, row + 1)
        )
        assert torch.equal(alone, turned[at])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_attention_in_torch_does_not_depend_on_cuts_nor_on_neighbours(dtype: torch.dtype, window: int | None) -> None:
    check_cuts(BACKENDS["torch"], dtype, 21, {1, 8, 20}, 2, 24, window, 5.0)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    length=st.sampled_from([1, 7, 63, 64, 65, 130, 300]),
    cuts=st.sets(st.integers(1, 299), max_size=5),
    group=st.sampled_from([1, 2, 4, 7]),
    dim=st.sampled_from([24, 64, 80, 128]),
    window=st.sampled_from([None, 1, 50, 100]),
    softcap=st.sampled_from([None, 5.0]),
)
def test_attention_of_a_prompt_does_not_depend_on_its_cuts_nor_on_its_neighbours(
    dtype: torch.dtype,
    length: int,
    cuts: set[int],
    group: int,
    dim: int,
    window: int | None,
    softcap: float | None,
) -> None:
    check_cuts(BACKENDS["cpu"], dtype, length, cuts, group, dim, window, softcap)


def check_cuts(
    ops: Ops,
    dtype: torch.dtype,
    length: int,
    cuts: set[int],
    group: int,
    dim: int,
    window: int | None,
    softcap: float | None,
) -> None:
    spec = AttentionSpec(scale=dim**-0.5, window=window, softcap=softcap)
    whole = paged_batch([5, length, 1], [33, length, 70], 8)
    cache = random(2, num_slots(whole), 2, dim, dtype=dtype)
    q = random(length + 6, 2 * group, dim, dtype=dtype, seed=1)
    expected = ops.attention(whole, spec)(q, cache)[5:-1]
    edges = [0, *sorted(cut for cut in cuts if cut < length), length]
    for start, end in pairwise(edges):
        part = paged_batch([end - start], [end], 8)
        part.block_tables_BM = whole.block_tables_BM[1:2]
        assert torch.equal(ops.attention(part, spec)(q[5 + start : 5 + end], cache), expected[start:end])
