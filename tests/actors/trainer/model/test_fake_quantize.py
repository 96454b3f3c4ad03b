"""QAT computes with the exporter's numbers to the bit, has torchao's gradients, and goes on alike after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.actors.trainer.technique_ranks import runs, went_on
from torch import Tensor, nn

from raytide.actors.models.quantized.codes import code_range, dequantized, round_integers
from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.model.fake_quantize import FakeQuantizedLinear, activate, fake_quantized
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.trainer import Trainer
from raytide.core.errors import CheckpointError, ConfigError, RaytideError
from raytide.core.specs.model import QatSpec
from raytide.core.specs.train import TrainSpec
from raytide.kernels.core import QuantizedWeight
from raytide.kernels.ref import quantized_linear

RunRanks = Callable[..., list[Any]]
BLOCKS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def weight_of(rows: int, groups: int, size: int, seed: int) -> Tensor:
    weight = torch.randn(rows, groups * size, generator=torch.Generator().manual_seed(seed))
    weight[0, :size] = 0.0
    return weight * torch.logspace(-4, 2, rows)[:, None]


def layer_of(weight: Tensor, **fields: object) -> FakeQuantizedLinear:
    base = nn.Linear(weight.shape[1], weight.shape[0])
    layer = FakeQuantizedLinear(base, QatSpec.parse(fields, where="qat"), torch.bfloat16)
    layer.load_state_dict({"weight": weight, "bias": torch.linspace(-1, 1, len(weight))})
    layer.active = True
    return layer


@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 4),
    size=st.sampled_from([8, 32, 40, 128]),
    bits=st.sampled_from([4, 8]),
    is_whole=st.booleans(),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 10_000),
)
def test_the_weights_are_those_of_the_exporter_to_the_bit(
    rows: int, groups: int, size: int, bits: int, is_whole: bool, symmetric: bool, dtype: torch.dtype, seed: int
) -> None:
    """The exporter reads weights that a run wrote in `dtype`."""
    weight, group = weight_of(rows, groups, size, seed), None if is_whole else size
    written = dequantized(round_integers(weight.to(dtype).float(), bits, group, dtype, symmetric=symmetric))
    found, _ = fake_quantized(weight, bits, group, symmetric, dtype)
    assert torch.equal(found, written)


class Round(torch.autograd.Function):
    """torchao's `_Round`: the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_are_those_of_torchao_s_formula(scheme: str, symmetric: bool) -> None:
    """`clamp(_Round(w / scale) + zero_point, quant_min, quant_max)`, then `(q - zero_point) * scale`, by autograd. The
    exporter adds the integer before it rounds, which differs in ties alone."""
    weight, x = weight_of(12, 3, 32, seed=2), torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(2))
    layer = layer_of(weight, scheme=scheme, group=32, symmetric=symmetric)
    x_ours, x_theirs, theirs = (each.clone().requires_grad_() for each in (x, x, weight))
    bits = 4 if scheme == "w4a16" else 8
    exported = theirs.to(torch.bfloat16).float()
    found = round_integers(exported.detach(), bits, 32, torch.bfloat16, symmetric=symmetric)
    scale = found.scale_NG.float()[..., None]
    zero = 0.0 if found.zero_NG is None else found.zero_NG.float()[..., None]
    codes = torch.clamp(Round.apply(exported.reshape(12, 3, 32) / scale + zero), *code_range(bits))
    expected = nn.functional.linear(x_theirs, ((codes - zero) * scale).reshape(12, 96), layer.bias.detach())
    out = layer(x_ours)
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
    by = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(by)
    expected.backward(by)
    for ours, reference in ((layer.weight.grad, theirs.grad), (x_ours.grad, x_theirs.grad)):
        assert ours is not None and reference is not None
        # The reference's gradient is rounded to bfloat16 on its way through the export's cast.
        assert torch.allclose(ours, reference, rtol=1e-2, atol=1e-4)
    assert layer.weight.grad is not None and theirs.grad is not None
    assert torch.equal(layer.weight.grad == 0, theirs.grad == 0)
    if symmetric and scheme == "w4a16":
        assert (layer.weight.grad == 0).any(), "weights above the greatest code are clamped"


@pytest.mark.parametrize("group", [None, 8, 32, 48])
def test_inputs_are_rounded_as_the_engine_does(group: int | None) -> None:
    weight, x = weight_of(6, 2, 48 if group == 48 else 64, seed=4), torch.randn(2, 3, 96 if group == 48 else 128)
    layer = layer_of(weight, scheme="w8a16", group=group, activations="int8")
    rounded = round_integers(weight.to(torch.bfloat16).float(), 8, group, torch.bfloat16)
    engine = quantized_linear(
        QuantizedWeight(8, rounded.codes_NK, rounded.scale_NG.float()), layer.bias.detach(), "int8"
    )
    x.requires_grad_()
    assert torch.allclose(layer(x).detach(), engine(x.detach().flatten(0, 1)).view(2, 3, -1), rtol=1e-5, atol=1e-4)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0, 0], dequantized(rounded).sum(0), rtol=1e-4, atol=1e-4), "straight through"


def with_qat(spec: TrainSpec, name: str = "qat", qat: object = None, **changes: Any) -> TrainSpec:
    known = {key: value for key, value in spec.model_dump().items() if key not in changes}
    qat = {"scheme": "w4a16", "group": 16} if qat is None else qat
    return TrainSpec.parse({**known, "qat": qat, **changes, "out": f"{spec.out}-{name}"}, where=name)


def losses(spec: TrainSpec, name: str = "alone") -> list[float]:
    found: list[float] = []
    train_local(spec.model_copy(update={"out": f"{spec.out}-{name}"}), on_step=lambda step: found.append(step.loss))
    return found


def test_two_ranks_follow_one_process_in_each_layout(spec: TrainSpec, run_ranks: RunRanks) -> None:
    qat = with_qat(spec, steps=5, qat={"scheme": "w4a16", "group": 16, "activations": "int8", "start_step": 2})
    alone, plain = losses(qat), losses(spec.model_copy(update={"steps": 5}), "plain")
    assert alone[:2] == plain[:2]
    assert abs(alone[2] - plain[2]) > 1e-4
    changes: dict[str, dict[str, Any]] = {
        "shard": {"layout": {"shard": 2}},
        "replicate": {"layout": {"replicate": 2}},
        "pipeline": {"layout": {"pipeline": 2}},
        "context": {"layout": {"context": 2}},
        "full": {"memory": {"checkpointing": "full"}},
        "selective": {"memory": {"checkpointing": "selective"}},
        "compile": {"memory": {"compile": True, "compile_backend": "aot_eager"}},
        "disk": {"memory": {"activations": "disk", "offload_min_bytes": 1024}},
    }
    found = run_ranks(2, runs, {name: with_qat(qat, name, qat.qat, **each) for name, each in changes.items()})[0]
    for name, run in found.items():
        assert run.losses == pytest.approx(alone, abs=2e-4), name


def test_a_resume_is_bit_equal_before_and_after_the_start_step(spec: TrainSpec, run_ranks: RunRanks) -> None:
    starts = {str(start): {"group": 16, "start_step": start} for start in (0, 3, 4)}
    specs = {name: with_qat(spec, name, qat) for name, qat in starts.items()}
    for by_start in run_ranks(2, went_on, specs):
        assert by_start["0"][0] != by_start["4"][0]
        for on, again in by_start.values():
            assert on == again


def test_another_scheme_does_not_resume(spec: TrainSpec) -> None:
    train_local(with_qat(spec, steps=2))
    with pytest.raises(CheckpointError):
        train_local(with_qat(spec, steps=4, qat={"scheme": "w8a16"}))


def test_the_head_the_embedding_and_skipped_layers_stay_as_they_are(spec: TrainSpec) -> None:
    qat = with_qat(spec, qat={"group": 16, "skip": ["*.down_proj", "model.layers.0.self_attn.*"]})
    with process_group.single_process() as group:
        trainer = Trainer(qat, group)
        part = trainer.model_parts[0]
        activate([part], qat.qat, 0)
        active = {name for name, each in part.named_modules() if isinstance(each, FakeQuantizedLinear) and each.active}
        trainer.close()
    ffn = {f"layers.{index}.ffn.{name}" for index in range(2) for name in BLOCKS[4:6]}
    assert active == ffn | {f"layers.1.attention.{name}" for name in BLOCKS[:4]}


def test_an_export_tells_its_scheme(spec: TrainSpec) -> None:
    qat = with_qat(spec, steps=1, export=True, export_dtype="bf16")
    train_local(qat)
    assert qat.qat is not None
    record = json.loads((Path(qat.out) / "model" / "raytide_qat.json").read_text())
    assert QatSpec.parse(record, where="record") == qat.qat


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": {"tensor": 2}}, "qat cannot be combined with layout.tensor above 1"),
        (
            {"layout": {"pipeline": 2, "schedule": "zbv_zero_bubble"}},
            "qat cannot be combined with layout.schedule zbv_zero_bubble",
        ),
        ({"precision": "fp8"}, "qat cannot be combined with precision fp8"),
        ({"init_from": "m", "model": {}, "finetune": {"lora": {}}}, "qat cannot be combined with finetune"),
        ({"precision": "bf16", "export_dtype": "fp32"}, "with export_dtype fp32 of precision bf16"),
        ({"qat": {"start_step": 10}}, "qat.start_step 10 must be below steps 10"),
        ({"qat": {"scheme": "int3"}}, "w8a16.*w4a16"),
        ({"qat": {"schema": "w4a16"}}, "did you mean scheme"),
        ({"qat": {"group": 4}}, "qat.group"),
    ],
)
def test_what_qat_cannot_do_is_refused_at_submission(spec: TrainSpec, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_qat(spec, **changes)


@pytest.mark.parametrize(
    ("qat", "words"),
    [
        ({"group": 24}, r"group of 24 does not divide the 128 inputs of model.layers.0.mlp.down_proj"),
        ({"skip": ["*"]}, "skip leaves no layer"),
    ],
)
def test_groups_that_do_not_fit_are_named(spec: TrainSpec, qat: dict[str, object], words: str) -> None:
    with pytest.raises(RaytideError, match=words):
        train_local(with_qat(spec, qat=qat))
