"""Quantised directories are those that compressed-tensors reads; a killed run goes on after its last layer."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.actors.engine.families import save_family
from tests.actors.engine.tiny import save_llama
from transformers import LlamaForCausalLM

from raytide.actors.engine.model.pooling import pooling_of
from raytide.actors.models.quantized.codes import dequantized, packed, round_fp8, round_integers
from raytide.actors.quality.evaluate import evaluate
from raytide.actors.quality.suite import HeldOutText, QualitySuite
from raytide.core.errors import ConfigError, ConflictError, DataError
from raytide.pipelines.compress.chain import compress
from raytide.pipelines.compress.quantize.rtn import _tensors_of
from raytide.pipelines.compress.recipe import CompressRecipe, RtnStep


def recipe(model: Path, out: Path, **rtn: object) -> CompressRecipe:
    return CompressRecipe.parse({"model": str(model), "out": str(out), "steps": [{"rtn": rtn}]}, where="recipe")


def save_bfloat16(folder: Path) -> LlamaForCausalLM:
    model = save_llama(folder).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([None, 8, 16]),
    symmetric=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_a_weight_is_at_most_half_a_step_from_its_code(
    bits: int, group: int | None, symmetric: bool, seed: int
) -> None:
    weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed))
    weight[1] = 0.0
    rounded = round_integers(weight, bits, group, torch.float32, symmetric=symmetric)
    step = rounded.scale_NG.repeat_interleave(32 // rounded.scale_NG.shape[1], 1)
    # The greatest weight of a symmetric group lies half a step above the last code.
    assert ((dequantized(rounded) - weight).abs() <= step * (0.5 + 1e-4)).all()
    if symmetric:
        assert int(rounded.codes_NK.min()) >= -(1 << bits - 1)
    assert (dequantized(rounded)[1] == 0).all()


def test_the_least_code_occurs() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for bits, group, least in ((8, None, -128), (4, 32, -8)):
        assert int(round_integers(weight, bits, group, torch.bfloat16).codes_NK.min()) == least


def test_codes_are_packed_lowest_bits_first() -> None:
    codes = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, 4, 5]], dtype=torch.int8)
    first, second = packed(codes, 4)[0].tolist()
    assert [first >> 4 * i & 15 for i in range(8)] == [0, 1, 8, 15, 9, 10, 11, 12]
    assert second & 15 == 13
    assert packed(torch.tensor([[127, -128, 0, 127]], dtype=torch.int8), 8).tolist() == [[0xFF8000FF - (1 << 32)]]


SCHEMES = {
    "w8a16": {"scheme": "w8a16"},
    "w8a16-g32": {"scheme": "w8a16", "group": 32},
    "w8a8": {"scheme": "w8a8"},
    "w4a16": {"scheme": "w4a16"},
    "w4a16-asymmetric": {"scheme": "w4a16", "symmetric": False},
    "fp8": {"scheme": "fp8"},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_reads_the_weights_that_were_meant(name: str, tmp_path: Path) -> None:
    """The format's own library unpacks each layer; the values are those of the codes, and near the original."""
    formats = pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig

    model = save_bfloat16(tmp_path / "model")
    card = compress(recipe(tmp_path / "model", tmp_path / "out", **SCHEMES[name]))
    folder = tmp_path / "out" / "model"
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = formats.BaseCompressor.load_from_registry(config["format"])
    written = tensors_of(folder)
    assert card.bytes < card.parent_bytes
    module = "model.layers.1.self_attn.k_proj"
    state = {key.removeprefix(f"{module}."): each for key, each in written.items() if key.startswith(f"{module}.")}
    found = _decompressed(compressor, state, scheme)
    original = model.get_submodule(module).weight.detach().float()
    step = RtnStep.parse(SCHEMES[name], where="step")
    if step.scheme != "fp8":
        bits = 4 if step.scheme == "w4a16" else 8
        rounded = round_integers(original, bits, step.group_size, torch.bfloat16, symmetric=step.symmetric)
        expected = dequantized(rounded)
        assert torch.allclose(found, expected, rtol=1e-2, atol=1e-4)
    assert float((found - original).norm() / original.norm()) < (0.12 if step.scheme == "w4a16" else 0.04)


def _decompressed(compressor: object, state: dict[str, torch.Tensor], scheme: object) -> torch.Tensor:
    out = compressor.decompress(state, scheme)  # type: ignore[attr-defined]
    return out["weight"].float()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_bfloat16(folder)
    return folder


def test_a_killed_run_goes_on_after_its_last_layer_and_gives_the_same_bytes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress(recipe(llama, tmp_path / "whole"))

    class Killed(BaseException):
        pass

    def kill(what: str, done: int, of: int) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        compress(recipe(llama, tmp_path / "out"), kill)
    assert not (tmp_path / "out" / "model").exists()
    rounded = list[str]()
    monkeypatch.setattr(
        "raytide.pipelines.compress.quantize.rtn._tensors_of",
        lambda module, *rest, real=_tensors_of: rounded.append(module) or real(module, *rest),
    )
    compress(recipe(llama, tmp_path / "out"))
    assert {name.split(".")[2] for name in rounded} == {"1", "2"}, "the first layer was there"
    for file in (tmp_path / "whole" / "model").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / "model" / file.name).read_bytes()
    before = (tmp_path / "out" / "model" / "config.json").stat().st_mtime_ns
    rounded.clear()
    compress(recipe(llama, tmp_path / "out"))
    assert rounded == []
    assert (tmp_path / "out" / "model" / "config.json").stat().st_mtime_ns == before
    assert list((tmp_path / "out").glob(".*.part")) == []


def test_the_result_of_another_recipe_is_not_overwritten(llama: Path, tmp_path: Path) -> None:
    compress(recipe(llama, tmp_path))
    with pytest.raises(ConflictError, match="result of another recipe"):
        compress(recipe(llama, tmp_path, scheme="w4a16"))
    (tmp_path / "own" / "model").mkdir(parents=True)
    with pytest.raises(ConflictError, match="was not written by raytide compress"):
        compress(recipe(llama, tmp_path / "own"))


def test_head_embeddings_and_skipped_layers_stay_as_they_are(llama: Path, tmp_path: Path) -> None:
    compress(recipe(llama, tmp_path, skip=["*.down_proj"]))
    before, after = tensors_of(llama), tensors_of(tmp_path / "model")
    kept = before.keys() & after.keys()
    assert "lm_head.weight" in kept
    assert "model.layers.0.mlp.down_proj.weight" in kept
    assert all(torch.equal(before[name], after[name]) for name in kept)
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(3))]


def test_a_model_that_embeds_pools_as_before(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    pooling = tmp_path / "model" / "1_Pooling" / "config.json"
    pooling.parent.mkdir()
    pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (tmp_path / "model" / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling"}]')
    compress(recipe(tmp_path / "model", tmp_path / "out"))
    assert pooling_of(tmp_path / "out" / "model") == "mean"
    assert (tmp_path / "out" / "model" / "modules.json").is_file()


@pytest.mark.parametrize("family", ["phi3-longrope", "qwen3-moe", "gemma3"])
def test_other_families_keep_what_is_no_plain_linear_layer(family: str, tmp_path: Path) -> None:
    save_family(tmp_path / "model", family)
    compress(recipe(tmp_path / "model", tmp_path / "out"))
    written = tensors_of(tmp_path / "out" / "model")
    packed_names = {name for name in written if name.endswith("weight_packed")}
    assert packed_names
    assert not [name for name in packed_names if "experts" in name or "embed" in name or "mlp.gate." in name]


def test_what_cannot_be_quantised_is_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"group of 48 does not divide the 160 inputs of model.layers.0.mlp.down_proj"
    ):
        compress(recipe(llama, tmp_path / "a", group=48))
    save_family(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ConfigError, match="GPT-2"):
        compress(recipe(tmp_path / "gpt2", tmp_path / "b"))
    compress(recipe(llama, tmp_path / "c"))
    with pytest.raises(ConfigError, match="quantised already"):
        compress(recipe(tmp_path / "c", tmp_path / "d"))


def test_stray_tensors_and_weights_that_are_not_finite_are_named(llama: Path, tmp_path: Path) -> None:
    for name, change, words in (
        ("stray", {"model.layers.0.mlp.up_proj.weight_packed": torch.zeros(2)}, "also has .*weight_packed"),
        ("nan", {"model.layers.1.mlp.up_proj.weight": torch.full((160, 64), math.nan)}, "up_proj.weight is not finite"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text((llama / "config.json").read_text())
        save_file(tensors_of(llama) | change, folder / "model.safetensors")
        with pytest.raises(DataError, match=words):
            compress(recipe(folder, tmp_path / f"{name}-out"))


def test_bad_recipes_say_what_is_wrong() -> None:
    for steps, words in (
        ([{"rtn": {"scheme": "w8a8", "group": 32}}], "leave group and symmetric out"),
        ([{"rtn": {}, "prune": {"ffn": 0.5}}], "a step is exactly one of"),
        ([{"rtn": {}}, {"prune": {"ffn": 0.5}}], "step 1, rtn, must be the last|needs calibration"),
        ([{"prune": {"ffn": 0.5}}], "step 1, prune, needs calibration"),
        ([{"gptq": {}}], "step 1, gptq, needs calibration"),
        ([{"prun": {"ffn": 0.5}}], "did you mean prune"),
        ([{"prune": {}}], "give ffn, hidden, kv_groups or layers below 1"),
        ([], "at least 1 item"),
    ):
        with pytest.raises(ConfigError, match=words):
            CompressRecipe.parse({"model": "m", "out": "o", "steps": steps}, where="recipe")
    held_out = {"model": "m", "out": "o", "steps": [{"gptq": {}}], "calibration": {"path": "a.txt"}}
    with pytest.raises(ConfigError, match="must not be a corpus of quality"):
        CompressRecipe.parse({**held_out, "quality": {"corpora": {"a": {"path": "a.txt"}}}}, where="recipe")


@pytest.mark.parametrize("name", SCHEMES)
def test_the_engine_computes_what_the_codes_stand_for(name: str, llama: Path, tmp_path: Path) -> None:
    """Its parent here is the same model with the weights that the codes stand for, as floats."""
    compress(recipe(llama, tmp_path / "out", **SCHEMES[name]))
    step = RtnStep.parse(SCHEMES[name], where="step")
    plain = tensors_of(llama)
    for key, weight in plain.items():
        if key.endswith("_proj.weight"):
            bits = 4 if step.scheme == "w4a16" else 8
            rounded = (
                round_fp8(weight.float(), torch.bfloat16)
                if step.scheme == "fp8"
                else round_integers(weight.float(), bits, step.group_size, torch.bfloat16, symmetric=step.symmetric)
            )
            plain[key] = dequantized(rounded)
    (tmp_path / "plain").mkdir()
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / "plain" / file).write_text((llama / file).read_text())
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    suite = QualitySuite(
        parent=str(tmp_path / "plain"),
        corpora={"code": HeldOutText(path=json.__file__, tokens=300)},
        dtype="float32",
        quantized_input="float",
        quantized_head=False,
    )
    found = evaluate(str(tmp_path / "out" / "model"), suite).corpora["code"]
    assert found.kl is not None
    assert found.kl < (0.02 if step.scheme in ("w8a8", "fp8") else 1e-6), "activations are rounded too in these two"
