"""Every variant that this machine has computes what the reference computes."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.paged import batches, num_slots

from raytide.core.errors import ConfigError
from raytide.kernels import cpu, ref
from raytide.kernels.core import Activation, AttentionSpec, NormWeights, PagedBatch, Rope
from raytide.kernels.device import resolve_device
from raytide.kernels.registry import Ops, ops_for, register

CPU = ops_for("cpu")


@settings(max_examples=80, deadline=None)
@given(
    batch=batches(),
    kv_heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, None, 1, 16]),
    softcap=st.sampled_from([None, None, 5.0]),
    seed=st.integers(0, 99),
)
def test_cpu_attention_in_torch_is_the_references(
    batch: PagedBatch, kv_heads: int, group: int, window: int | None, softcap: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(2, num_slots(batch), kv_heads, 16, generator=generator)
    q = torch.randn(sum(batch.query_lens), kv_heads * group, 16, generator=generator)
    spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
    torch.testing.assert_close(
        cpu.attention(batch, spec)(q, cache), ref.attention(batch, spec)(q, cache), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_cpu_linear_and_norm_in_torch_are_the_references(dtype: torch.dtype, rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 48), (80, 48), (80,)))
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.15, "rtol": 0.02}
    given_bias = bias if biased else None
    torch.testing.assert_close(cpu.linear(weight, given_bias)(x), ref.linear(weight, given_bias)(x), **close)
    by = NormWeights(x[0], None, 1e-5)
    torch.testing.assert_close(cpu.norm(x, by), ref.norm(x, by), **close)
    torch.testing.assert_close(cpu.add_norm(x.clone(), x, by), ref.add_norm(x.clone(), x, by), **close)


def test_rope_is_a_rotation_of_the_pairs_half_a_head_apart_and_keys_and_values_go_to_their_slots() -> None:
    qkv = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))  # 3 query heads, 1 key, 1 value
    angles = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    pairs = torch.view_as_complex(torch.stack(qkv[:, :4].chunk(2, -1), -1))
    expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    values, cache = qkv[:, 4].clone(), torch.zeros(2, 6, 1, 8)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    ref.rope_write(qkv, Rope(cos, sin), None, cache, torch.tensor([5, 0, 2]))
    torch.testing.assert_close(qkv[:, :4], torch.cat((expected.real, expected.imag), -1))
    torch.testing.assert_close(cache[:, [5, 0, 2], 0], torch.stack((qkv[:, 3], values)))
    assert not cache[:, [1, 3, 4]].any()


def test_activate_mul_gates_the_second_half() -> None:
    gate, up = torch.randn(2, 3, 7)
    torch.testing.assert_close(ref.activate_mul(torch.cat((gate, up), -1), "silu"), gate * gate.sigmoid() * up)


def test_the_environment_forces_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CPU.attention is not ref.attention
    monkeypatch.setenv("RAYTIDE_OP_ATTENTION", "ref")
    assert ops_for("cpu").attention is ref.attention
    monkeypatch.setenv("RAYTIDE_OP_ATTENTION", "fastest")
    with pytest.raises(ConfigError, match="RAYTIDE_OP_ATTENTION"):
        ops_for("cpu")


def test_the_best_variant_whose_probe_holds_is_chosen_and_others_devices_are_left_alone() -> None:
    def better(gate_up_T2F: torch.Tensor, kind: Activation) -> torch.Tensor:
        return ref.activate_mul(gate_up_T2F, kind)

    register("activate_mul", "testchip", priority=99, probe=lambda: False)(lambda *_: torch.zeros(0))
    register("activate_mul", "testchip", priority=5)(better)
    assert ops_for("testchip").activate_mul is better
    assert CPU.activate_mul is not better


def test_a_device_without_variants_runs_on_references() -> None:
    assert ops_for("abacus") == Ops(**{op.name: getattr(ref, op.name) for op in fields(Ops)})


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="warp"):
        resolve_device("warp")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            resolve_device("cuda:1")
    with pytest.raises(ConfigError, match="float16"):
        resolve_device("cpu").dtype("float16")
