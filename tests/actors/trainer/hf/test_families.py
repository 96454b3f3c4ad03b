"""The trainer's decoder against transformers' own model of each family: logits, gradients, and files both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.actors.engine.families import FAMILIES, save_family
from torch import Tensor
from transformers import AutoModelForCausalLM

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.families import read_architecture
from raytide.actors.trainer.hf.safetensors_writer import ShardedSafetensorsWriter
from raytide.actors.trainer.hf.weight_mapping import FamilyFormat, HfWeights, file_tensors, to_hf_tensor
from raytide.actors.trainer.model.transformer import Transformer
from raytide.core.errors import DataError

LENGTH = 48


def decoder_of(folder: Path) -> Transformer:
    arch = read_architecture(folder)
    model, weights = Transformer(arch, LENGTH), HfWeights(folder, arch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name, tuple(slice(0, size) for size in parameter.shape)))
    return model


def ids(vocab: int, batch: int = 2) -> Tensor:
    return torch.randint(0, vocab, (batch, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def as_in_transformers(arch: Architecture, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of its modules, which keep all experts together."""
    form = FamilyFormat(FamilyFormat.on_the_hub(arch).root, "mlp.gate", fused_experts=True)
    return {each.name: to_hf_tensor(each, tensors.__getitem__) for each in file_tensors(arch, form)}


def write(model: Transformer, folder: Path, limit: float = 1e9) -> None:
    tensors = file_tensors(model.arch, FamilyFormat.on_the_hub(model.arch))
    files = ShardedSafetensorsWriter(tensors, torch.float32, limit)
    weights = dict(model.named_parameters())
    for tensor in tensors:
        files.add(folder, tensor.name, to_hf_tensor(tensor, lambda name: weights[name].detach()))
    files.close(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs: Any = save_family(tmp_path, family)
    ours = decoder_of(tmp_path)
    tokens = ids(ours.arch.vocab_size)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = theirs(inputs).logits
    assert (ours(inputs) - expected).abs().max() <= 1e-4

    loss = ours(inputs, targets)
    reference = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    assert abs(float((loss - reference).detach())) <= 1e-5 * float(reference.detach())
    loss.backward()
    reference.backward()
    found = as_in_transformers(
        ours.arch, {name: each.grad for name, each in ours.named_parameters() if each.grad is not None}
    )
    wanted = {name: each.grad for name, each in theirs.named_parameters() if each.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 1e-4 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("family", FAMILIES)
def test_written_files_load_in_transformers_and_here_as_they_were(family: str, tmp_path: Path) -> None:
    """In several files, each of one or a few tensors."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    theirs: Any = save_family(source, family)
    ours = decoder_of(source)
    copy.mkdir()
    (copy / "config.json").write_text((source / "config.json").read_text())
    write(ours, copy, limit=60_000)
    assert len(list(copy.glob("model-*.safetensors"))) > 3
    loaded = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    again = dict(decoder_of(copy).named_parameters())
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.named_parameters())


@pytest.mark.parametrize("family", ["gpt2", "phi3-longrope", "qwen3-moe"])
def test_a_block_is_that_part_of_the_whole(family: str, tmp_path: Path) -> None:
    save_family(tmp_path, family)
    arch = read_architecture(tmp_path)
    weights = HfWeights(tmp_path, arch)
    for name, parameter in Transformer(arch, LENGTH).named_parameters():
        whole = weights.read(name, tuple(slice(0, size) for size in parameter.shape))
        block = tuple(slice(size // 3, size // 2 + 1) for size in parameter.shape)
        assert torch.equal(weights.read(name, block), whole[block]), name
        nothing = (slice(parameter.shape[0], parameter.shape[0]), *block[1:])
        assert weights.read(name, nothing).shape == whole[nothing].shape


def test_all_that_is_wrong_with_the_weights_is_named_at_once(tmp_path: Path) -> None:
    save_family(tmp_path, "mistral-window")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.norm.weight"] = torch.zeros(3)
    weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)  # older files have it; it means nothing
    save_file(weights, file)
    with pytest.raises(DataError) as caught:
        HfWeights(tmp_path, read_architecture(tmp_path))
    said = str(caught.value)
    assert "lacks model.layers.1.mlp.up_proj.weight" in said
    assert "also has model.layers.9.mlp.up_proj.weight" in said
    assert "another shape model.norm.weight (3,) for (64,)" in said
    assert "inv_freq" not in said


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_the_balancing_loss_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    """The loss is that of each sequence by itself, without padding, weighted by the targets that count."""
    theirs: Any = save_family(tmp_path, family, router_aux_loss_coef=0.5, output_router_logits=True)
    ours = decoder_of(tmp_path)
    assert ours.balance == 0.5
    tokens, lengths = ids(ours.arch.vocab_size), (LENGTH, 30)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    expected = torch.zeros(())
    targets[1, lengths[1] :] = -100
    for row, length in enumerate(lengths):
        out = theirs(inputs[row : row + 1, :length])
        cross = torch.nn.functional.cross_entropy(out.logits[0], targets[row, :length], reduction="sum")
        expected = expected + cross + 0.5 * out.aux_loss * length
    loss = ours(inputs, targets)
    assert abs(float((loss - expected).detach())) <= 1e-5 * float(expected.detach())
    loss.backward()
    expected.backward()
    for index in ours.layers:
        ffn = ours.layers[index].ffn
        if hasattr(ffn, "router"):
            wanted = theirs.model.layers[int(index)].mlp.gate.weight.grad
            assert (ffn.router.weight.grad - wanted).abs().max() <= 1e-4 * max(1.0, float(wanted.abs().max()))


def test_without_the_routers_logits_there_is_no_balancing(tmp_path: Path) -> None:
    save_family(tmp_path, "mixtral")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["router_aux_loss_coef"] > 0
    assert Transformer(read_architecture(tmp_path), LENGTH).balance == 0.0
