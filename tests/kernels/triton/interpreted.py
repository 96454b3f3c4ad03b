"""Every kernel computes what the reference computes, in Triton's interpreter: `test_interpreter.py` runs this file in a
process that has TRITON_INTERPRET=1 before Triton is imported.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as examples
from hypothesis import strategies as st
from tests.kernels.paged import num_slots, paged_batch

from raytide.kernels import ref
from raytide.kernels.core import (
    Activation,
    AttentionSpec,
    HeadNorms,
    LinearInput,
    NormWeights,
    PagedBatch,
    QuantizedWeight,
    Rope,
)
from raytide.kernels.triton import attention, feed_forward, norm, quantized_linear, rope_write
from raytide.kernels.triton.dot import INTERPRETED
from raytide.kernels.triton.geometry import DecodeBatch

assert INTERPRETED

settings.register_profile(
    "interpreted", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("interpreted")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = st.sampled_from(list(TOLERANCE))
SEEDS = st.integers(0, 999)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares relative to the largest number, because sums of many terms cancel."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    largest = max(expected.float().abs().max().item(), 1.0) if expected.numel() else 1.0
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found.float() / largest, expected.float() / largest, atol=tolerance, rtol=tolerance)


@st.composite
def small_batches(draw: st.DrawFn) -> PagedBatch:
    queries = draw(st.lists(st.sampled_from([1, 1, 2, 5, 20]), min_size=1, max_size=3))
    contexts = [query + draw(st.sampled_from([0, 1, 31, 64, 150])) for query in queries]
    return paged_batch(queries, contexts, draw(st.sampled_from([1, 3, 16])), draw(SEEDS))


@settings(max_examples=40)
@examples(
    batch=small_batches(),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (6, 2), (7, 1), (20, 1)]),
    dim=st.sampled_from([16, 24, 80]),
    window=st.sampled_from([None, None, 1, 16]),
    softcap=st.sampled_from([None, 5.0]),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_attention(
    batch: PagedBatch,
    heads: tuple[int, int],
    dim: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    query_heads, kv_heads = heads
    cache = random(2, num_slots(batch), kv_heads, dim, dtype=dtype)
    qkv = random(sum(batch.query_lens), query_heads + 2 * kv_heads, dim, dtype=dtype)
    spec, q = AttentionSpec(0.3, window, softcap), qkv[:, :query_heads]
    assert_close(attention.attention(batch, spec)(q, cache), ref.attention(batch, spec)(q, cache))


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("context", [1, 512, 700])
def test_a_long_context_that_is_split_is_the_same_as_a_whole_one(window: int | None, context: int) -> None:
    batch = paged_batch([1], [context], 16)
    assert context == 1 or attention._plan(batch, 4, 32, 1, 4)[0].splits > 1
    cache, q = random(2, num_slots(batch), 1, 24), random(1, 3, 24)
    spec = AttentionSpec(0.3, window)
    assert_close(attention.attention(batch, spec)(q, cache), ref.attention(batch, spec)(q, cache))


def test_contexts_that_change_in_place_are_followed_by_a_bound_attention() -> None:
    """A captured graph launches the same kernels with the same addresses; only the tensors' contents change."""
    decode = DecodeBatch.allocate(3, width=40, block_size=16, device=torch.device("cpu"))
    bound, spec = attention.attention(decode, AttentionSpec(0.3)), AttentionSpec(0.3)
    cache, q = random(2, 200 * 16, 1, 16), random(3, 2, 16)
    for contexts in ([5, 640, 90], [1, 17, 333]):
        plain = paged_batch([1, 1, 1], contexts, 16)
        decode.block_tables_BM[:, : plain.block_tables_BM.shape[1]] = plain.block_tables_BM
        decode.lens_B3[:, 2] = torch.tensor(contexts)
        assert_close(bound(q, cache), ref.attention(plain, spec)(q, cache))


def test_a_bound_attention_refuses_what_it_has_no_kernel_for_instead_of_repeating_the_captured_step() -> None:
    decode = DecodeBatch.allocate(1, width=2, block_size=16, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no kernel for 1 heads of 300"):
        attention.attention(decode, AttentionSpec(0.3))(random(1, 1, 300), random(2, 32, 1, 300))
    with pytest.raises(IndexError):
        ref.attention(decode, AttentionSpec(0.3))


@settings(max_examples=20)
@examples(
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    dim=st.sampled_from([8, 20, 64]),
    turned=st.sampled_from([0.0, 0.5, 1.0]),
    has_norms=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_rope_write(
    heads: tuple[int, int], dim: int, turned: float, has_norms: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    query_heads, kv_heads = heads
    size = int(dim * turned) // 2 * 2
    rope = Rope(random(3, size, dtype=dtype), random(3, size, dtype=dtype)) if size else None
    norms = HeadNorms(random(dim, dtype=dtype), random(dim, dtype=dtype), 1e-6) if has_norms else None
    qkv, cache = random(3, query_heads + 2 * kv_heads, dim, dtype=dtype), torch.zeros(2, 9, kv_heads, dim, dtype=dtype)
    expected_qkv, expected_cache, slots = qkv.clone(), cache.clone(), torch.tensor([7, 0, 3])
    rope_write.rope_write(qkv, rope, norms, cache, slots)
    ref.rope_write(expected_qkv, rope, norms, expected_cache, slots)
    assert_close(qkv, expected_qkv)
    assert_close(cache, expected_cache)


@settings(max_examples=50)
@examples(
    rows=st.sampled_from([0, 1, 3]),
    size=st.sampled_from([1, 48, 64, 1000]),
    kind=st.sampled_from(["rms", "layer"]),
    has_bias=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_norms(rows: int, size: int, kind: str, has_bias: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    bias = random(size, dtype=dtype) if has_bias and kind == "layer" else None
    by = NormWeights(random(size, dtype=dtype), bias, 1e-5, kind)  # type: ignore[arg-type]
    x, delta = random(rows, 2 * size, dtype=dtype)[:, :size] + 2, random(rows, size, dtype=dtype)  # the mean counts
    assert_close(norm.norm(x, by), ref.norm(x, by))
    stream, expected_stream = x.clone(), x.clone()
    assert_close(norm.add_norm(stream, delta, by), ref.add_norm(expected_stream, delta, by))
    assert_close(stream, expected_stream)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [1, 30, 1100])
def test_activate_mul(kind: Activation, dtype: torch.dtype, size: int) -> None:
    gate_up = 3 * random(2, 2 * size, dtype=dtype)
    assert_close(feed_forward.activate_mul(gate_up, kind), ref.activate_mul(gate_up, kind))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "size"), [(1, 32), (9, 32), (9, 20)])
def test_experts_of_which_some_are_chosen_by_no_token(dtype: torch.dtype, tokens: int, size: int) -> None:
    torch.manual_seed(tokens)
    gate_up, down = random(5, 48, size, dtype=dtype) / 4, random(5, size, 24, dtype=dtype) / 4
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
    given = random(tokens, size, dtype=dtype), chosen, torch.rand(tokens, 2)
    assert_close(feed_forward.experts(gate_up, down, "silu")(*given), ref.experts(gate_up, down, "silu")(*given))


def random_weight(bits: int, outputs: int, inputs: int, groups: int, offset: bool, ordered: bool) -> QuantizedWeight:
    """The codes hold both extremes, -128 and -8 among them."""
    lowest = -(1 << bits - 1)
    codes = torch.randint(lowest, -lowest, (outputs, inputs), dtype=torch.int8)
    codes[0, 0], codes[-1, -1] = lowest, -lowest - 1
    offsets = torch.randn(outputs, groups) if offset else None
    columns = torch.randperm(inputs) if ordered else None
    return QuantizedWeight(bits, codes, torch.rand(outputs, groups) / 50, offsets, columns)  # type: ignore[arg-type]


@settings(max_examples=100)
@examples(
    bits=st.sampled_from([4, 8]),
    cut=st.sampled_from([(96, 3), (96, 1), (80, 10), (80, 1), (144, 3), (256, 2), (1, 1), (576, 9)]),
    rows=st.sampled_from([0, 1, 2, 40]),
    outputs=st.sampled_from([1, 40, 130]),
    offset=st.booleans(),
    ordered=st.booleans(),
    biased=st.booleans(),
    input_as=st.sampled_from(["float", "int8"]),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_quantized_linear(
    bits: int,
    cut: tuple[int, int],
    rows: int,
    outputs: int,
    offset: bool,
    ordered: bool,
    biased: bool,
    input_as: LinearInput,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    inputs, groups = cut
    weight = random_weight(bits, outputs, inputs, groups, offset, ordered)
    bias, x = random(outputs, dtype=dtype) if biased else None, random(rows, inputs, dtype=dtype)
    found = quantized_linear.quantized_linear(weight, bias, input_as)(x)
    assert_close(found, ref.quantized_linear(weight, bias, input_as)(x))


def test_the_codes_of_int8_inputs_are_the_references_ties_and_all() -> None:
    weight = random_weight(8, 2, 70, 1, False, True)
    packed = quantized_linear.pack(weight, for_int8=True)
    x = torch.randn(3, 70)
    x[0, weight.columns_K[:4]] = torch.tensor([127.0, 0.5, 1.5, -2.5])  # type: ignore[index]
    codes, scales = quantized_linear._rounded(x, packed)
    expected, expected_scales = ref.input_codes(x, weight.columns_K, 70)
    assert torch.equal(codes.view(3, 1, -1, 32).float(), expected)
    assert torch.equal(scales, expected_scales.view(3, -1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("input_as", ["float", "int8"])
def test_a_number_that_is_not_finite_shows_in_its_own_row_alone(value: float, input_as: LinearInput) -> None:
    weight = random_weight(4, 8, 96, 3, True, False)
    x = torch.randn(2, 96)
    x[1, 50] = value
    found = quantized_linear.quantized_linear(weight, None, input_as)(x)
    assert found[0].isfinite().all() and not found[1].isfinite().any()
