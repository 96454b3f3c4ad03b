"""The divergences are those of their definitions, and a student learns its teacher's predictions."""

from __future__ import annotations

import copy
import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.actors.engine.tiny import VOCAB, save_llama
from torch import Tensor

from raytide.actors.models.families import architecture_of
from raytide.actors.trainer.model.distillation import (
    Teacher,
    TopPredictions,
    _Cache,
    distillation_sum,
    top_predictions,
)
from raytide.actors.trainer.model.loss import IGNORE, Micro
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.parallel.forward_backward import SingleStage
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import ConfigError
from raytide.core.io.token_dataset import load_manifest
from raytide.core.specs.data import DataSpec, TokenizerSpec
from raytide.core.specs.model import DistillSpec
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import TrainSpec
from raytide.pipelines.build import build
from raytide.pipelines.runners.inline import InlineRunner


def defined(student: Tensor, teacher: Tensor, spec: DistillSpec) -> float:
    """The definition of GKD's divergence (Agarwal et al. 2024, equation 1), in float64 probabilities."""
    q, p = ((each.double() / spec.temperature).softmax(-1) for each in (student, teacher))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum()

    if spec.loss == "jsd":
        mixture = spec.beta * p + (1 - spec.beta) * q
        return float(spec.beta * kl(p, mixture) + (1 - spec.beta) * kl(q, mixture))
    return float(kl(p, q) if spec.loss == "forward_kl" else kl(q, p))


SPECS = [
    {"loss": "forward_kl"},
    {"loss": "reverse_kl", "temperature": 2.0},
    {"loss": "jsd", "beta": 0.1},
    {"loss": "jsd", "beta": 0.5, "temperature": 0.7},
]


@pytest.mark.parametrize("fields", SPECS)
def test_the_loss_is_the_definition_over_the_tokens_that_count(fields: dict[str, object]) -> None:
    spec = DistillSpec.parse({"teacher": "t", **fields}, where="distill")
    student, teacher = (3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(i)) for i in range(2))
    targets = torch.tensor([1, IGNORE, 2, 3, IGNORE, 4])
    found = distillation_sum(student, teacher, targets, spec)
    assert float(found) == pytest.approx(defined(student[targets >= 0], teacher[targets >= 0], spec), rel=1e-5)
    student.requires_grad_()
    distillation_sum(student, teacher, targets, spec).backward()
    assert student.grad is not None
    assert (student.grad[targets < 0] == 0).all()
    assert (student.grad[targets >= 0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("fields", SPECS)
def test_the_most_likely_tokens_and_a_bucket_for_the_rest_are_a_distribution_of_their_own(
    fields: dict[str, object],
) -> None:
    """The divergence of a coarser distribution is a lower bound, and the whole one if all tokens are compared."""
    student, teacher = (3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(i)) for i in range(2))
    targets = torch.ones(6, dtype=torch.int64)
    losses = []
    for top_k in (1, 4, 16, 39):
        spec = DistillSpec.parse({"teacher": "t", "top_k": top_k, **fields}, where="distill")
        losses.append(float(distillation_sum(student, top_predictions(teacher, spec), targets, spec)))
    assert losses == sorted(losses)
    assert losses[-1] == pytest.approx(defined(student, teacher, spec), rel=1e-3)


def test_a_teacher_s_own_predictions_cost_nothing() -> None:
    logits = torch.randn(5, 40)
    for loss in ("forward_kl", "reverse_kl", "jsd"):
        spec = DistillSpec(teacher="t", loss=loss, top_k=8)
        top = top_predictions(logits, spec)
        assert float(distillation_sum(logits, top, torch.ones(5, dtype=torch.int64), spec)) == pytest.approx(
            0, abs=1e-5
        )
        assert isinstance(top, TopPredictions)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, a student of its weights with noise, and a dataset of the teacher's tokenizer."""
    folder = tmp_path_factory.mktemp("distill")
    save_llama(folder / "teacher", num_hidden_layers=1)
    student, generator = save_llama(folder / "student", num_hidden_layers=1), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    student.save_pretrained(folder / "student")
    (folder / "a.txt").write_text(Path(json.__file__).read_text())
    file = TokenizerSpec(file=str(folder / "teacher" / "tokenizer.json"), eos="<eos>")
    build(DataSpec(inputs=(str(folder / "a.txt"),), tokenizer=file, out=str(folder / "data")), runner=InlineRunner())
    assert load_manifest(str(folder / "data")).vocab_size == VOCAB
    return folder


def spec_of(folder: Path, out: Path, **distill: object) -> TrainSpec:
    fields = {
        "dataset": str(folder / "data"),
        "init_from": str(folder / "student"),
        "out": str(out),
        "steps": 24,
        "global_batch": 4,
        "micro_batch": 2,
        "seq_len": 32,
        "optim": {"lr": 0.005},
        "distill": {"teacher": str(folder / "teacher"), **distill},
        "export": False,
    }
    return TrainSpec.parse(fields, where="train")


def losses(spec: TrainSpec) -> list[float]:
    found: list[float] = []
    train_local(spec, on_step=lambda result: found.append(result.loss))
    return found


def test_a_student_comes_nearer_to_its_teacher_and_a_cache_changes_nothing(folder: Path, tmp_path: Path) -> None:
    plain = losses(spec_of(folder, tmp_path / "a", top_k=64))
    assert np.mean(plain[-4:]) < 0.8 * np.mean(plain[:4])
    cached = losses(spec_of(folder, tmp_path / "b", top_k=64, cache=str(tmp_path / "cache")))
    assert cached == pytest.approx(plain, rel=1e-2)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.npz")}
    assert files
    again = losses(spec_of(folder, tmp_path / "c", top_k=64, cache=str(tmp_path / "cache")))
    assert again == cached
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.npz")} == files


def test_a_student_that_is_its_teacher_has_nothing_to_learn(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder, tmp_path / "a")
    found = losses(spec.model_copy(update={"init_from": str(folder / "teacher"), "steps": 1}))
    assert found[0] == pytest.approx(0, abs=1e-5)


def test_a_teacher_of_another_vocabulary_and_layouts_without_whole_logits_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    save_llama(tmp_path / "other", num_hidden_layers=1, vocab_size=VOCAB + 8)
    with pytest.raises(ConfigError, match="has a vocabulary of 520, and the student one of 512"):
        losses(spec_of(folder, tmp_path / "a", teacher=str(tmp_path / "other")))
    body = spec_of(folder, tmp_path / "b").model_dump(mode="json")
    with pytest.raises(ConfigError, match="distill needs all logits of a sequence on one rank"):
        TrainSpec.parse({**body, "layout": {"tensor": 2}}, where="train")
    with pytest.raises(ConfigError, match="give top_k"):
        spec_of(folder, tmp_path / "c", cache="somewhere")


def test_a_damaged_file_of_the_cache_is_computed_again(tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    save_file({"weight": torch.zeros(1)}, tmp_path / "teacher" / "model.safetensors")
    cache = _Cache(DistillSpec(teacher=str(tmp_path / "teacher"), top_k=2, cache=str(tmp_path / "cache")))
    cache.write("abc", TopPredictions(torch.arange(8).reshape(4, 2), torch.zeros(4, 2)))
    (file,) = (tmp_path / "cache").rglob("*.npz")
    body = file.read_bytes()
    unknown_method = body.find(b"PK\x01\x02") + 10
    for damaged in (b"", body[:10], body[:-20], body[:unknown_method] + b"\x63" + body[unknown_method + 1 :]):
        file.write_bytes(damaged)
        assert cache.read("abc") is None
    file.write_bytes(body)
    assert cache.read("abc") is not None


def test_a_full_disk_of_the_cache_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "teacher").mkdir()
    save_file({"weight": torch.zeros(1)}, tmp_path / "teacher" / "model.safetensors")
    cache = _Cache(DistillSpec(teacher=str(tmp_path / "teacher"), top_k=2, cache=str(tmp_path / "cache")))
    top = TopPredictions(torch.arange(8).reshape(4, 2), torch.full((4, 2), -0.1))

    def full(file: Path, **_: object) -> None:
        file.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        used = cache.write("abc", top)
    assert list((tmp_path / "cache").rglob("*.npz")) == []
    cache.write("abc", top)
    stored = cache.read("abc")
    assert stored is not None
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(used, stored, strict=True))


def test_a_student_with_experts_still_balances_its_routers() -> None:
    """The teacher is the student: what is left of the loss is the balancing loss."""
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
        "output_router_logits": True, "router_aux_loss_coef": 0.5,
    }  # fmt: skip
    student = Transformer(architecture_of(config, "student"), 16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    teacher = Teacher(DistillSpec(teacher="t"), copy.deepcopy(student), torch.float32, torch.device("cpu"))
    tokens = torch.randint(64, (2, 17), generator=generator)
    stage = SingleStage(Parallelism(), student, None, teacher)  # type: ignore[arg-type]
    loss = stage._distill(Micro(tokens[:, :-1], tokens[:, 1:]), teacher)
    assert float(loss.detach()) >= 0.5 * 2 * 32 * 0.9  # coefficient * experts of a token * targets, if balanced
    loss.backward()
    assert student.layers["0"].ffn.router.weight.grad.abs().max() > 0
