"""The kernels on a GPU compute what the reference computes there, and a CUDA graph what its step does."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.paged import num_slots, paged_batch

from raytide.kernels import ref
from raytide.kernels.core import AttentionSpec, HeadNorms, LinearInput, NormWeights, PagedBatch, QuantizedWeight, Rope
from raytide.kernels.device import resolve_device
from raytide.kernels.registry import ops_for
from raytide.kernels.triton.decode_graphs import DecodeGraphs
from raytide.kernels.triton.graph_capture import CudaGraphCapture
from raytide.kernels.triton.support import can_run

if not can_run():
    pytest.skip("this machine has no GPU that the kernels support", allow_module_level=True)

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _exact_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=GPU).to(dtype)


def on_gpu(batch: PagedBatch) -> PagedBatch:
    tables, slots = batch.block_tables_BM.to(GPU), batch.slots_T.to(GPU)
    return PagedBatch(batch.query_lens, batch.context_lens, tables, slots, batch.block_size)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    largest, tolerance = expected.float().abs().max(), TOLERANCE[expected.dtype]
    torch.testing.assert_close(found.float() / largest, expected.float() / largest, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (7, 1), (14, 2)])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [([1], [9000]), ([1] * 40, list(range(1, 41))), ([1, 300, 1, 77], [500, 300, 2000, 1000])],
    ids=["long", "many", "mixed"],
)
def test_attention(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, queries: list[int], contexts: list[int]
) -> None:
    batch = on_gpu(paged_batch(queries, contexts, 16))
    cache = random(2, num_slots(batch), heads[1], dim, dtype=dtype)
    q = random(sum(queries), heads[0], dim, dtype=dtype)
    for spec in (AttentionSpec(dim**-0.5), AttentionSpec(dim**-0.5, 100), AttentionSpec(dim**-0.5, 1000, 30.0)):
        attend = ops_for(resolve_device().kind).attention(batch, spec)
        assert_close(attend(q, cache), ref.attention(batch, spec)(q, cache))


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 16, 40, 700])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 32, 128])
@pytest.mark.parametrize("input_as", ["float", "int8"])
def test_quantized_linear(dtype: torch.dtype, rows: int, bits: int, groups: int, input_as: LinearInput) -> None:
    lowest = -(1 << bits - 1)
    codes = torch.randint(lowest, -lowest, (1000, 4096), dtype=torch.int8, device=GPU)
    scales, offsets = torch.rand(1000, groups, device=GPU) / 50, random(1000, groups)
    weight = QuantizedWeight(bits, codes, scales, offsets, torch.randperm(4096, device=GPU))  # type: ignore[arg-type]
    x, bias = random(rows, 4096, dtype=dtype), random(1000, dtype=dtype)
    apply = ops_for(resolve_device().kind).quantized_linear(weight, bias, input_as)
    assert_close(apply(x), ref.quantized_linear(weight, bias, input_as)(x))


@DTYPES
def test_short_kernels(dtype: torch.dtype) -> None:
    ops = ops_for(resolve_device().kind)
    qkv, cache, slots = random(50, 48, 128, dtype=dtype), random(2, 64, 8, 128, dtype=dtype), torch.arange(50, 0, -1)
    expected_qkv, expected_cache = qkv.clone(), cache.clone()
    rope = Rope(random(50, 128, dtype=dtype), random(50, 128, dtype=dtype))
    norms = HeadNorms(random(128, dtype=dtype), random(128, dtype=dtype), 1e-6)
    ops.rope_write(qkv, rope, norms, cache, slots.to(GPU))
    ref.rope_write(expected_qkv, rope, norms, expected_cache, slots.to(GPU))
    assert_close(qkv, expected_qkv)
    assert_close(cache, expected_cache)
    x, delta = random(50, 4096, dtype=dtype), random(50, 4096, dtype=dtype)
    by = NormWeights(random(4096, dtype=dtype), None, 1e-5)
    assert_close(ops.add_norm(x.clone(), delta, by), ref.add_norm(x.clone(), delta, by))
    assert_close(ops.activate_mul(x, "silu"), ref.activate_mul(x, "silu"))


@DTYPES
def test_experts(dtype: torch.dtype) -> None:
    gate_up, down = random(8, 512, 256, dtype=dtype) / 16, random(8, 256, 256, dtype=dtype) / 16
    chosen = torch.stack([torch.randperm(8, device=GPU)[:2] for _ in range(40)])
    given = random(40, 256, dtype=dtype), chosen, torch.rand(40, 2, device=GPU)
    ops = ops_for(resolve_device().kind)
    assert_close(ops.experts(gate_up, down, "silu")(*given), ref.experts(gate_up, down, "silu")(*given))


def test_a_cuda_graph_follows_contexts_that_grow() -> None:
    ops, cache = ops_for(resolve_device().kind), random(2, 100 * 16, 2, 64, dtype=torch.bfloat16)
    q = random(16, 8, 64, dtype=torch.bfloat16)

    def forward(ids_T: torch.Tensor, positions_T: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        return ops.attention(batch, AttentionSpec(0.1))(q[: len(ids_T)], cache)

    graphs = DecodeGraphs(
        forward, CudaGraphCapture(), most_rows=16, table_width=60, block_size=16, dummy_block=99, device=GPU
    )
    for contexts in ([3, 900, 40], [1, 2, 3, 4, 5], [17, 901, 41], [960]):
        batch = on_gpu(paged_batch([1] * len(contexts), contexts, 16))
        ids = torch.zeros(len(contexts), dtype=torch.int64, device=GPU)
        found = graphs.run(ids, ids, batch)
        assert found is not None
        assert_close(found, ref.attention(batch, AttentionSpec(0.1))(q[: len(contexts)], cache))
