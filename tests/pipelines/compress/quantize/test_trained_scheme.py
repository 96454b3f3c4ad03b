"""A model that was trained with quantisation is written as it was trained, and loses less than one rounded later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.actors.trainer.conftest import VOCAB, write_dataset

from raytide.actors.models.quantized.codes import packed, round_integers
from raytide.actors.quality.corpus import Window
from raytide.actors.quality.scorers import DirectoryScorer, QuantizedInput
from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.model.fake_quantize import FakeQuantizedLinear, activate
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.trainer import Trainer
from raytide.core.errors import ConfigError, DataError
from raytide.core.specs.train import TrainSpec
from raytide.pipelines.compress.chain import compress, with_trained_scheme
from raytide.pipelines.compress.recipe import CompressRecipe, CompressStep

QAT: dict[str, object] = {"scheme": "w4a16", "group": 32}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tokens", tokens=20_000, shard_tokens=(20_000,))


def spec_of(dataset: Path, out: Path, **changes: Any) -> TrainSpec:
    fields = {
        "dataset": str(dataset),
        "out": str(out),
        "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "max_seq_len": 64, "ffn_dim": 128},
        "optim": {"lr": 0.003, "warmup_steps": 2},
        "steps": 4,
        "global_batch": 8,
        "seq_len": 32,
        **changes,
    }
    return TrainSpec.parse(fields, where="train")


def rounded(run: str, out: Path, **rtn: object) -> Path:
    compress(CompressRecipe.parse({"model": run, "out": str(out), "steps": [{"rtn": rtn}]}, where="recipe"))
    return out / "model"


def held_out(count: int) -> list[list[int]]:
    """Rows of the dataset's rule, with other noise."""
    random = np.random.default_rng(1)
    steps = random.choice([1, 2, 5], size=(count, 33), p=[0.7, 0.2, 0.1])
    return [[int(token) for token in row] for row in np.cumsum(steps, 1) % VOCAB]


def loss(folder: Path) -> float:
    scorer = DirectoryScorer(folder, "float32", 33, "float", quantized_head=False)
    return float(torch.cat([scorer.nll(Window(row, 1)) for row in held_out(40)]).mean())


@pytest.mark.parametrize(
    ("qat", "engine"),
    [
        (QAT, "float"),
        ({"scheme": "w4a16", "group": 16, "symmetric": False}, "float"),
        ({"scheme": "w8a16", "skip": ["*.down_proj"]}, "float"),
        ({**QAT, "activations": "int8"}, "int8"),
    ],
)
def test_the_exported_model_computes_what_was_trained(
    qat: dict[str, object], engine: QuantizedInput, dataset: Path, tmp_path: Path
) -> None:
    spec = spec_of(dataset, tmp_path / "run", qat=qat)
    train_local(spec)
    folder, row = rounded(spec.out, tmp_path / "out"), held_out(1)[0]
    with process_group.single_process() as group:
        trainer = Trainer(spec, group)
        trainer.restore()
        assert trainer.steps_done == spec.steps
        part = trainer.model_parts[0]
        plain = part(torch.tensor([row[:-1]]))[0].detach()
        activate([part], spec.qat, spec.steps)
        trained = part(torch.tensor([row[:-1]]))[0].detach()
        trainer.close()
    found = DirectoryScorer(folder, "float32", 33, engine, quantized_head=False).logits(Window(row, 1))
    apart = (found - trained).abs().amax(-1)
    near_ties = (
        0.1 if engine == "int8" else 0.0
    )  # where float32's last bit decides to which integer an input is rounded
    assert float((apart > 1e-5).float().mean()) <= near_ties
    assert float(apart.max()) < 1e-3
    assert float((plain - trained).abs().max()) > 1e-4


def test_a_bfloat16_export_has_the_codes_and_scales_that_were_trained(dataset: Path, tmp_path: Path) -> None:
    spec = spec_of(dataset, tmp_path / "run", qat=QAT, precision="bf16")
    train_local(spec)
    folder = rounded(spec.out, tmp_path / "out")
    written = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    with process_group.single_process() as group:
        trainer = Trainer(spec, group)
        trainer.restore()
        layers = [each for each in trainer.model_parts[0].modules() if isinstance(each, FakeQuantizedLinear)]
        weights = [layer.weight.detach().full_tensor() for layer in layers]  # type: ignore[operator]
        trainer.close()
    assert len(layers) == 14
    codes = {name: each for name, each in written.items() if name.endswith("weight_packed")}
    for weight in weights:
        expected = round_integers(weight.to(torch.bfloat16).float(), 4, 32, torch.bfloat16)
        module = next(name for name, each in codes.items() if torch.equal(each, packed(expected.codes_NK, 4)))
        assert torch.equal(written[module.replace("packed", "scale")], expected.scale_NG)
        del codes[module]


def scale_channels(folder: Path) -> None:
    """Gives a model the outliers that large ones have: channels of its norms are divided by powers of two of up to 32,
    and the weights behind them multiplied. It computes the same, but weights of a group differ widely."""
    (file,) = folder.glob("*.safetensors")
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    behind = {"input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    behind["post_attention_layernorm"] = ("mlp.gate_proj", "mlp.up_proj")
    for layer in range(2):
        for norm, modules in behind.items():
            factors = torch.exp2((torch.rand(32, generator=generator) * 5).round())
            tensors[f"model.layers.{layer}.{norm}.weight"] /= factors
            for module in modules:
                tensors[f"model.layers.{layer}.{module}.weight"] *= factors
    save_file(tensors, file)


def test_it_loses_less_than_a_model_that_is_rounded_later(dataset: Path, tmp_path: Path) -> None:
    base = spec_of(dataset, tmp_path / "base", steps=200, optim={"lr": 0.01, "warmup_steps": 5})
    train_local(base)
    scale_channels(tmp_path / "base" / "model")
    for seed in range(3):
        more: dict[str, Any] = {"init_from": base.out, "model": {}, "seed": seed, "steps": 60}
        plain = spec_of(dataset, tmp_path / f"plain{seed}", **more)
        trained = spec_of(dataset, tmp_path / f"qat{seed}", **more, qat=QAT)
        train_local(plain)
        train_local(trained)
        before = loss(Path(plain.out) / "model")
        rounded_later = loss(rounded(plain.out, tmp_path / f"later{seed}", **QAT)) - before
        with_qat = loss(rounded(trained.out, tmp_path / f"out{seed}")) - before
        assert rounded_later > 0.02
        assert with_qat < 0.5 * rounded_later, f"seed {seed}: {with_qat:.4f} and {rounded_later:.4f}"


def test_a_recipe_that_distils_with_qat_rounds_as_it_was_trained(dataset: Path, tmp_path: Path) -> None:
    spec = spec_of(dataset, tmp_path / "run", steps=1)
    train_local(spec)
    train = {"dataset": str(dataset), "steps": 2, "global_batch": 4, "seq_len": 32, "qat": QAT}
    fields = {"model": spec.out, "out": str(tmp_path / "out"), "steps": [{"distill": {"train": train}}, {"rtn": {}}]}
    card = compress(CompressRecipe.parse(fields, where="recipe"))
    assert card.steps[1].options["rtn"] == {"scheme": "w4a16", "group": 32, "symmetric": True, "skip": []}
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The record alone: no step reads more before it is checked."""
    record = {"scheme": "w4a16", "group": None, "skip": ["*.down_proj"], "start_step": 5}
    (tmp_path / "raytide_qat.json").write_text(json.dumps(record))
    return tmp_path


def step_of(**fields: object) -> CompressStep:
    return CompressStep.parse(fields, where="step")


@pytest.mark.parametrize("rtn", [{}, {"scheme": "w4a16"}, {"group": 32, "skip": ["*.down_proj"]}])
def test_rtn_takes_what_the_training_recorded(rtn: dict[str, object], trained: Path) -> None:
    expected = step_of(rtn={"scheme": "w4a16", "group": 32, "symmetric": True, "skip": ["*.down_proj"]})
    assert with_trained_scheme(step_of(rtn=rtn), trained) == expected


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"rtn": {"scheme": "w8a16"}}, r"rtn.scheme w8a16 differs from the w4a16 that .* was trained for"),
        ({"rtn": {"group": 64}}, "rtn.group 64 differs from the 32"),
        ({"rtn": {"symmetric": False}}, "rtn.symmetric False differs from the True"),
        ({"rtn": {"skip": []}}, "rtn.skip"),
        ({"gptq": {"group": 32}}, "was trained for w4a16, and gptq would write other weights"),
        ({"smoothquant": {}}, "smoothquant would write other weights"),
    ],
)
def test_other_schemes_are_refused(step: dict[str, object], words: str, trained: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        with_trained_scheme(step_of(**step), trained)


def test_steps_before_the_rounding_and_models_without_a_record_are_left_alone(trained: Path, tmp_path: Path) -> None:
    prune, rtn = step_of(prune={"ffn": 0.5}), step_of(rtn={})
    assert with_trained_scheme(prune, trained) is prune
    (tmp_path / "other").mkdir()
    assert with_trained_scheme(rtn, tmp_path / "other") is rtn


def test_a_damaged_record_is_named(trained: Path) -> None:
    (trained / "raytide_qat.json").write_text("{")
    with pytest.raises(DataError, match=r"raytide_qat.json is damaged"):
        with_trained_scheme(step_of(rtn={}), trained)
