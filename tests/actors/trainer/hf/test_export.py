"""The exported directory is what Hugging Face's own code loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.hf.export import FullParameters
from raytide.actors.trainer.trainer import Trainer
from raytide.core.errors import DeniedError
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_it_with_equal_logits(spec: TrainSpec, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    model = ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, max_seq_len=64, tie_embeddings=tied, rope_theta=5000.0)
    with process_group.single_process() as mine:
        trainer = Trainer(spec.model_copy(update={"model": model}), mine)
        for _ in range(3):
            trainer.step()
        path = Path(trainer.export())
        ids = torch.from_numpy(trainer.data.batch(torch.arange(4).numpy()))
        with torch.no_grad():
            ours = trainer.model_parts[0](ids)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert theirs.config.architectures == ["LlamaForCausalLM"]
    with torch.no_grad():
        logits = theirs(ids).logits
    assert torch.allclose(ours, logits, atol=2e-6, rtol=0)
    assert torch.equal(ours.argmax(-1), logits.argmax(-1))


def test_the_directory_is_complete_and_replaces_an_older_one(spec: TrainSpec) -> None:
    old = Path(spec.out) / "model"
    old.mkdir(parents=True)
    (old / "stale").touch()
    with process_group.single_process() as mine:
        path = Path(Trainer(spec.model_copy(update={"precision": "bf16"}), mine).export())
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in path.iterdir()} == names
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert [file.name for file in Path(spec.out).iterdir()] == ["model"]


def test_a_rank_that_is_lost_during_an_export_leaves_no_files_behind(
    spec: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = FullParameters.gather

    def break_off(parameters: FullParameters, name: str) -> Tensor | None:
        if any(Path(spec.out).iterdir()):
            raise RuntimeError("a peer has left")
        return gather(parameters, name)

    monkeypatch.setattr(FullParameters, "gather", break_off)
    with process_group.single_process() as mine:
        trainer = Trainer(spec, mine)
        Path(spec.out).mkdir(exist_ok=True)
        with pytest.raises(RuntimeError, match="a peer has left"):
            trainer.export()
    assert list(Path(spec.out).iterdir()) == []


def test_a_link_among_the_files_that_go_along_shows_no_secret(
    spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A team's folder may have a link in it to a file that only raytide's user can read."""
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path / "home"))
    secret = tmp_path / "home" / "clusters" / "local" / "tokens.json"
    secret.parent.mkdir(parents=True)
    secret.write_text('{"the operator\'s": {"user": "admin", "team": "*"}}')
    with process_group.single_process() as mine:
        model = Path(Trainer(spec, mine).export())
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "chat_template.jinja").symlink_to(secret)
    after = spec.model_copy(update={"init_from": str(model), "out": str(tmp_path / "after")})
    with process_group.single_process() as mine, pytest.raises(DeniedError, match="folder of raytide"):
        Trainer(after, mine).export()
    assert not list((tmp_path / "after").rglob("chat_template.jinja"))
