"""Pruning cuts the parts that contribute nothing, and the model that is left is a plain one."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.actors.engine.families import save_family
from tests.actors.engine.tiny import save_llama
from transformers import AutoModelForCausalLM

from raytide.actors.quality.evaluate import evaluate
from raytide.actors.quality.suite import HeldOutText, QualitySuite
from raytide.core.errors import ConfigError
from raytide.pipelines.compress.card import read_card, weight_bytes
from raytide.pipelines.compress.chain import compress
from raytide.pipelines.compress.recipe import CompressRecipe, MaskStep

TEXT = argparse.__file__
IDS = torch.arange(1, 60)[None]


def recipe(model: Path, out: Path, *steps: dict[str, object], **more: object) -> CompressRecipe:
    fields = {"model": str(model), "out": str(out), "steps": steps, "calibration": {"path": TEXT, "tokens": 400}}
    return CompressRecipe.parse({**fields, **more}, where="recipe")


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits
    return found


@pytest.mark.parametrize(
    ("part", "step", "sizes"),
    [
        ("ffn", {"ffn": 0.6}, {"intermediate_size": 96}),
        ("heads", {"kv_groups": 0.5}, {"num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 16}),
        ("layers", {"layers": 0.67}, {"num_hidden_layers": 2}),
    ],
)
def test_parts_that_do_nothing_are_cut_and_the_logits_stay(
    part: str, step: dict[str, object], sizes: dict[str, int], tmp_path: Path
) -> None:
    model = save_llama(tmp_path / "model")
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            if part == "ffn":
                idle = torch.randperm(160, generator=torch.Generator().manual_seed(index))[:64]
                layer.mlp.up_proj.weight[idle] = 0
            elif part == "heads":
                group = index % 2
                layer.self_attn.v_proj.weight[group * 16 : (group + 1) * 16] = 0
            elif index == 1:
                layer.mlp.down_proj.weight.zero_()
                layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(tmp_path / "model")
    card = compress(recipe(tmp_path / "model", tmp_path / "out", {"prune": step}))
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert {name: config[name] for name in sizes} == sizes
    assert card.bytes < card.parent_bytes
    assert torch.allclose(logits(tmp_path / "out" / "model"), logits(tmp_path / "model"), atol=1e-4)


def test_the_least_important_width_is_cut_everywhere(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "model", tie_word_embeddings=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter[::2] = 1e-4
    model.save_pretrained(tmp_path / "model")
    compress(recipe(tmp_path / "model", tmp_path / "out", {"prune": {"hidden": 0.5}}))
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert torch.equal(small.model.embed_tokens.weight, model.model.embed_tokens.weight[:, 1::2])
    assert torch.equal(small.model.layers[2].mlp.down_proj.weight, model.model.layers[2].mlp.down_proj.weight[1::2])
    assert torch.equal(
        small.model.layers[1].self_attn.q_proj.weight, model.model.layers[1].self_attn.q_proj.weight[:, 1::2]
    )


@pytest.mark.parametrize("family", ["qwen3-tied", "phi3-longrope", "gemma3", "llama2-mha-untied-biased", "smollm3"])
def test_families_are_pruned_to_what_transformers_loads_and_the_engine_computes_alike(
    family: str, tmp_path: Path
) -> None:
    save_family(tmp_path / "model", family)
    heads: dict[str, object] = {} if family.startswith("phi3") else {"kv_groups": 0.5}
    step: dict[str, object] = {"ffn": 0.67, "layers": 0.67, **heads}
    compress(recipe(tmp_path / "model", tmp_path / "out", {"prune": step}))
    folder = tmp_path / "out" / "model"
    nll = torch.nn.functional.cross_entropy(logits(folder)[0, :-1], IDS[0, 1:])
    (tmp_path / "ids.jsonl").write_text(json.dumps({"tokens": IDS[0].tolist()}))
    suite = QualitySuite(corpora={"ids": HeldOutText(path=str(tmp_path / "ids.jsonl"))}, dtype="float32", window=64)
    assert evaluate(str(folder), suite).corpora["ids"].nll == pytest.approx(float(nll), rel=1e-3)


def test_what_a_family_cannot_lose_is_said(tmp_path: Path) -> None:
    for family, step, words in (
        ("gemma2", {"hidden": 0.5}, "embeddings are scaled by its width"),
        ("gpt2", {"kv_groups": 0.5}, "size of its heads"),
        ("phi3-longrope", {"hidden": 0.5}, "size of its heads"),
        ("mixtral", {"ffn": 0.5}, "are experts"),
        ("llama3-mqa", {"ffn": 0.5, "multiple": 64}, "cannot be cut from 96 to a multiple of 64"),
    ):
        save_family(tmp_path / family, family)
        with pytest.raises(ConfigError, match=words):
            compress(recipe(tmp_path / family, tmp_path / f"{family}-out", {"prune": step}))


def test_layers_whose_kind_follows_from_their_number_stay(tmp_path: Path) -> None:
    model = save_family(tmp_path / "model", "gpt2")
    with torch.no_grad():
        for linear in (model.transformer.h[0].attn.c_proj, model.transformer.h[0].mlp.c_proj):
            linear.weight.zero_()
            linear.bias.zero_()
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="kinds of its layers follow from their numbers"):
        compress(recipe(tmp_path / "model", tmp_path / "out", {"prune": {"layers": 0.67}}))


def test_a_chain_goes_on_after_its_finished_steps_and_its_card_tells_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path / "model")
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(Path(json.__file__).read_text()[:2000])
    quality = {"corpora": {"code": {"path": str(held_out), "tokens": 100}}, "gate": {"max_kl": 1e-6}}
    asked = recipe(
        tmp_path / "model", tmp_path / "out", {"prune": {"ffn": 0.6}}, {"rtn": {}}, quality=quality, speed=True
    )
    with monkeypatch.context() as patch:
        patch.setattr("raytide.pipelines.compress.quantize.rtn.run_rtn", None)
        with pytest.raises(TypeError):
            compress(asked)
    with monkeypatch.context() as patch:
        patch.setattr("raytide.pipelines.compress.prune.prune.run_prune", None)
        card = compress(asked)
    assert [step.kind for step in card.steps] == ["prune", "rtn"]
    assert card.parent_bytes > card.steps[0].bytes > card.steps[1].bytes == card.bytes
    assert card.quality is not None
    assert card.broken[0].startswith("kl is ")
    assert card.speed is not None
    assert card.speed.keys() == {"parent_c1", "parent_c8", "model_c1", "model_c8"}
    assert all(value > 0 for value in card.speed.values())
    assert read_card(tmp_path / "out" / "model") == card
    with monkeypatch.context() as patch:
        patch.setattr("raytide.pipelines.compress.chain.evaluate", None)
        assert compress(asked) == card


def test_files_that_the_index_does_not_name_are_no_bytes_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_llama(folder)
    (file,) = folder.glob("*.safetensors")
    shutil.copyfile(file, folder / "consolidated.safetensors")  # as in Mistral's directories
    index = {"weight_map": {"model.norm.weight": file.name, "lm_head.weight": file.name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(folder) == file.stat().st_size


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_masks_keep_half_of_each_four_and_say_that_no_byte_is_saved(method: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    card = compress(recipe(tmp_path / "model", tmp_path / "out", {"mask": {"method": method, "pattern": "2:4"}}))
    masked = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").model.layers[1].mlp.down_proj.weight
    assert ((masked.unflatten(-1, (-1, 4)) == 0).sum(-1) == 2).all()
    assert card.bytes == pytest.approx(card.parent_bytes, rel=0.02)
    assert "no byte" in (MaskStep.__doc__ or "")
