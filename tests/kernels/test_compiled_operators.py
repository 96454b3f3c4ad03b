"""The C operators compute what the reference computes, for every shape that a model can have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.paged import batches, num_slots, paged_batch

from raytide.kernels import compiled, ref
from raytide.kernels.core import Activation, AttentionSpec, HeadNorms, NormWeights, PagedBatch, Rope
from raytide.kernels.library import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler here")

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [16, 24, 32, 64, 80, 96, 128, 256]


def close(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 3e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=150, deadline=None)
@given(
    batch=batches(),
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 4, 7, 16]),
    dim=st.sampled_from(SIZES),
    window=st.sampled_from([None, None, 1, 16, 100]),
    softcap=st.sampled_from([None, None, 5.0]),
    deterministic=st.booleans(),
    is_int8=st.booleans(),
)
def test_attention_is_the_references(
    batch: PagedBatch,
    dtype: torch.dtype,
    kv_heads: int,
    group: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    deterministic: bool,
    is_int8: bool,
) -> None:
    cache = random(2, num_slots(batch), kv_heads, dim, dtype=dtype)
    if is_int8:
        cache = ref.rounded_heads(cache)
    qkv = random(sum(batch.query_lens), kv_heads * group + 2 * kv_heads, dim, dtype=dtype, seed=1)
    q = qkv[:, : kv_heads * group]
    spec = AttentionSpec(scale=dim**-0.5, window=window, softcap=softcap)
    operator = compiled.invariant_attention if deterministic else compiled.attention
    torch.testing.assert_close(operator(batch, spec)(q, cache), ref.attention(batch, spec)(q, cache), **close(dtype))


@pytest.mark.parametrize("odd", ["dim", "head_gap", "mixed_dtypes"])
def test_attention_of_shapes_that_the_c_code_does_not_take_is_the_references(odd: str) -> None:
    dim = 514 if odd == "dim" else 32
    batch, spec = paged_batch([3, 1], [5, 9], 4), AttentionSpec(scale=0.1)
    cache = random(2, num_slots(batch), 2, dim, dtype=torch.float32)
    q = random(4, 2, dim, dtype=torch.bfloat16 if odd == "mixed_dtypes" else torch.float32)
    if odd == "head_gap":
        q = random(4, 2, 2 * dim, dtype=torch.float32)[..., :dim]
    torch.testing.assert_close(compiled.attention(batch, spec)(q, cache), ref.attention(batch, spec)(q, cache))


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 40) | st.sampled_from([64, 400]),
    size=st.sampled_from([1, 31, 32, 33, 80, 200]),
    width=st.sampled_from([1, 2, 48, 63, 200, 2048]),
    biased=st.booleans(),
)
def test_linear_is_the_references(dtype: torch.dtype, rows: int, size: int, width: int, biased: bool) -> None:
    x, weight = random(rows, width, dtype=dtype), random(size, width, dtype=dtype, seed=1) * width**-0.5
    bias = random(size, dtype=dtype, seed=2) if biased else None
    torch.testing.assert_close(compiled.linear(weight, bias)(x), ref.linear(weight, bias)(x), **close(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("size", [5, 16, 100, 512])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_norms_are_the_references(dtype: torch.dtype, kind: str, size: int, rows: int) -> None:
    x, delta = (3 * random(rows, size, dtype=dtype, seed=seed) + 1 for seed in (0, 1))
    weight, bias = (random(size, dtype=dtype, seed=seed) for seed in (2, 3))
    by = NormWeights(weight, bias if kind == "layer" else None, 1e-5, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(compiled.norm(x, by), ref.norm(x, by), **close(dtype))
    sums = x.clone(), x.clone()
    torch.testing.assert_close(compiled.add_norm(sums[0], delta, by), ref.add_norm(sums[1], delta, by), **close(dtype))
    assert torch.equal(*sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [7, 32, 1000])
def test_activations_are_the_references(dtype: torch.dtype, kind: Activation, size: int) -> None:
    x = 20 * random(30, 2 * size, dtype=dtype)
    torch.testing.assert_close(compiled.activate(x, kind), ref.activate(x, kind), **close(dtype))
    torch.testing.assert_close(compiled.activate_mul(x, kind), ref.activate_mul(x, kind), **close(dtype))


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.sampled_from([1, 2, 70]),
    heads=st.sampled_from([1, 4]),
    kv_heads=st.sampled_from([1, 2]),
    dim=st.sampled_from(SIZES),
    turned=st.sampled_from([None, 0.5, 1.0]),
    normed=st.booleans(),
    is_int8=st.booleans(),
)
def test_rope_and_cache_write_are_the_references(
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    turned: float | None,
    normed: bool,
    is_int8: bool,
) -> None:
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    angles = 6 * random(tokens, int((turned or 1) * dim) // 2, dtype=torch.float32, seed=1)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    rope = None if turned is None else Rope(cos.to(dtype), sin.to(dtype))
    norms = HeadNorms(random(dim, dtype=dtype, seed=2), random(dim, dtype=dtype, seed=3), 1e-6) if normed else None
    slots = torch.randperm(tokens + 3)[:tokens]
    results = []
    for rope_write in (compiled.rope_write, ref.rope_write):
        mine, cache = qkv.clone(), torch.zeros(2, tokens + 3, kv_heads, dim, dtype=dtype)
        if is_int8:
            cache = ref.rounded_heads(cache)
        rope_write(mine, rope, norms, cache, slots)
        results.append((mine, ref.dequantized_heads(cache, dtype) if is_int8 else cache))
    step = 0.1 if is_int8 else 0.0  # a number between two codes may go to either
    torch.testing.assert_close(*results, atol=step + (0.06 if dtype == torch.bfloat16 else 1e-5), rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_rounded_as_the_reference_rounds_them(dtype: torch.dtype) -> None:
    """To the bit; a head of zeros, one of tiny numbers and ones that are not finite among them."""
    qkv = random(9, 4, 24, dtype=dtype)
    qkv[1, 2], qkv[2, 3], qkv[3, 2, 5], qkv[4, 3, 0] = 0, 1e-42, float("nan"), float("-inf")
    caches = [torch.zeros(2, 9, 1, 24 + ref.SCALE_BYTES, dtype=torch.int8) for _ in range(2)]
    for rope_write, cache in zip((compiled.rope_write, ref.rope_write), caches, strict=True):
        rope_write(qkv.clone(), None, None, cache, torch.arange(9))
    assert torch.equal(*caches)
    back = ref.dequantized_heads(caches[0], torch.float32)
    assert back[0, 3].isnan().all() and back[1, 4].isnan().all()
    assert back.isnan().sum() == 2 * 24
    whole = qkv[5:, 2:].float().transpose(0, 1)[:, :, None]
    assert (back[:, 5:] - whole).abs().max() <= whole.abs().amax() / 127 / 2 + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_the_references(dtype: torch.dtype) -> None:
    x, chosen = random(9, 32, dtype=dtype), torch.randint(5, (9, 2), generator=torch.Generator().manual_seed(0))
    gate_up, down = random(5, 96, 32, dtype=dtype) * 0.2, random(5, 32, 48, dtype=dtype) * 0.2
    weights = random(9, 2, dtype=dtype).softmax(-1)
    mine = compiled.experts(gate_up, down, "silu")(x, chosen, weights)
    torch.testing.assert_close(mine, ref.experts(gate_up, down, "silu")(x, chosen, weights), **close(dtype))
