"""Training on from a Hugging Face directory: what is read, what learns, what is kept and what comes out."""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from tests.actors.engine.families import save_family
from tests.actors.trainer.conftest import write_dataset
from tests.actors.trainer.model_ranks import export_and_tune
from tokenizers import Tokenizer

from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.models.families import read_architecture
from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.hf.model_source import open_data, resolve_model
from raytide.actors.trainer.hf.weight_mapping import HfWeights
from raytide.actors.trainer.model.loss import IGNORE
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.run_log.mfu import flops_per_token
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.trainer import Trainer
from raytide.actors.trainer.types import StepResult
from raytide.core.errors import CheckpointError, ConfigError, DataError
from raytide.core.io import storage
from raytide.core.specs.model import ChatSpec, FinetuneSpec, LoraSpec, ModelSpec
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import MemorySpec, OptimSpec, TrainSpec

RunRanks = Callable[..., list[Any]]
Start = Callable[..., TrainSpec]
LORA = FinetuneSpec(lora=LoraSpec(rank=3, alpha=6.0))


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """A spec that trains a family's model on from its directory, with its tokenizer."""

    def make(family: str, number: int = 0, **more: Any) -> TrainSpec:
        folder, data = tmp_path / family, tmp_path / "tokens"
        if not folder.exists():
            save_family(folder, family)
        if not data.exists():
            write_dataset(data)
            shutil.copyfile(folder / "tokenizer.json", data / "tokenizer.json")
        return TrainSpec(
            dataset=str(data),
            init_from=str(folder),
            out=str(tmp_path / f"run-{family}-{number}"),
            optim=OptimSpec(lr=3e-3, warmup_steps=1, weight_decay=0.0),
            steps=4,
            global_batch=6,
            micro_batch=2,
            seq_len=32,
            collective_timeout_s=30.0,
        ).model_copy(update=more)

    return make


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    arch = read_architecture(folder)
    files = HfWeights(folder, arch)
    shapes = {name: each.shape for name, each in Transformer(arch, 8).named_parameters()}
    return {name: files.read(name, tuple(slice(0, size) for size in shape)) for name, shape in shapes.items()}


def losses(spec: TrainSpec) -> list[float]:
    found: list[float] = []
    train_local(spec, on_step=lambda result: found.append(result.loss))
    return found


def test_any_layout_reads_its_shards_writes_the_whole_and_tunes_alike(start: Start, run_ranks: RunRanks) -> None:
    """Turned over, stacked and expert by expert, in unequal shards, two ways at once, and tied over the ends of a
    pipeline; written into several files. Adapters learn the same on each layout."""
    three = Parallelism(shard=3)
    square, ends = Parallelism(pipeline=2, tensor=2), Parallelism(pipeline=2, schedule="zbv_zero_bubble")
    cases = (
        ("gpt2", three),
        ("qwen3-moe", three),
        ("phi3-longrope", square),
        ("gemma3", ends),
    )
    exported = [start(case[0], number, layout=case[1], export_shard_gb=1e-4) for number, case in enumerate(cases)]
    adapters = {"finetune": LORA, "export": False, "optim": OptimSpec(lr=0.02, warmup_steps=0)}
    tuned = [
        start(family, number, layout=layout, **adapters)
        for number, (family, layout) in enumerate((("gemma3", ends), ("llama3-mqa", square)), 10)
    ]
    curves = run_ranks(4, export_and_tune, exported, tuned)[0]
    for spec in exported:
        check_copy(Path(spec.init_from or ""), Path(spec.out) / "model")
    alone = {family: losses(start(family, 20, **adapters)) for family in ("gemma3", "llama3-mqa")}
    for curve, reference in zip(curves, alone.values(), strict=True):
        assert reference[-1] < reference[0]
        assert max(abs(a - b) for a, b in zip(reference, curve, strict=True)) <= 5e-6


def check_copy(source: Path, copy: Path) -> None:
    """The same weights and config, in several files."""
    before, after = weights_of(source), weights_of(copy)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], each) for name, each in before.items())
    assert json.loads((copy / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (copy / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("finetune", [None, LORA])
def test_a_resume_is_bit_equal(start: Start, finetune: FinetuneSpec | None) -> None:
    spec = start("qwen3-tied", finetune=finetune, export=False)
    whole = losses(spec.model_copy(update={"out": spec.out + "-whole"}))
    before: list[float] = []
    with process_group.single_process() as mine:
        trainer = Trainer(spec, mine)
        trainer.run(on_step=lambda result: before.append(result.loss), paused=lambda: trainer.steps_done == 2)
    assert len(before) == 2
    assert before + losses(spec) == whole


def test_with_adapters_nothing_else_learns_or_is_kept(start: Start) -> None:
    spec = start("llama3-mqa", finetune=LORA, export=False)
    with process_group.single_process() as mine:
        trainer = Trainer(spec, mine)
        before = {name: each.detach().clone() for name, each in trainer.model_parts[0].named_parameters()}
        for _ in range(2):
            trainer.step()
        trainer.save()
        trainer.checkpoints.wait()
        after = dict(trainer.model_parts[0].named_parameters())
        changed = {name for name, each in after.items() if not torch.equal(each.detach(), before[name])}
    assert changed == {name for name in after if "lora_" in name}
    assert len(changed) == 3 * 7 * 2
    stored = sum(file.stat().st_size for file in (Path(spec.out) / "checkpoints").rglob("*.distcp"))
    frozen = sum(each.numel() for name, each in after.items() if name not in changed) * 4
    assert 0 < stored < frozen  # the adapters and their two moments are a fifth of that, the rest is DCP's own


@pytest.mark.parametrize("family", ["llama3-mqa", "phi3-longrope", "gpt2", "qwen3-moe"])
def test_adapter_and_merged_model_compute_what_was_trained(start: Start, family: str) -> None:
    """Also where the files stack the projections, keep them turned over, or have experts without adapters."""
    spec = start(family, finetune=LORA, optim=OptimSpec(lr=0.05, warmup_steps=0, weight_decay=0.0))
    prompt = list(range(7, 37))
    with process_group.single_process() as mine:
        trainer = Trainer(spec, mine)
        for _ in range(3):
            trainer.step()
        merged = Path(trainer.export())
        with torch.no_grad():
            trained = trainer.model_parts[0](torch.tensor([prompt]))[0, -1]
    assert spec.init_from is not None
    base = LLM(spec.init_from, max_model_len=32)
    before = base.logits(prompt)[-1]
    base.load_lora("tuned", str(merged.parent / "adapter"))
    assert (trained - before).abs().max() > 0.05
    assert (LLM(merged, max_model_len=32).logits(prompt)[-1] - trained).abs().max() <= 1e-4
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = [
        llm.generate([prompt[:20]], sampling, lora=lora)[0].outputs[0].token_ids
        for llm, lora in ((base, "tuned"), (LLM(merged, max_model_len=32), None))
    ]
    assert tokens[0] == tokens[1]


def test_what_came_with_the_model_stays_with_it(start: Start) -> None:
    spec = start("qwen3-tied", export_dtype="bf16", steps=1)
    folder = Path(spec.init_from or "")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.3}')
    config = json.loads((folder / "config.json").read_text()) | {"use_cache": False, "a_field_of_its_own": 7}
    (folder / "config.json").write_text(json.dumps(config))
    train_local(spec)
    model = Path(spec.out) / "model"
    exported = json.loads((model / "config.json").read_text())
    assert exported == config | {"dtype": "bfloat16"}
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (model / name).read_bytes() == (folder / name).read_bytes()
    again = start("qwen3-tied", init_from=spec.out, out=spec.out + "-2", steps=1, export=False)
    assert losses(again)


def test_a_config_trains_any_family_from_nothing(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "gemma3"
    spec = start("gemma3", init_from=None, export=True)
    body = json.loads((folder / "config.json").read_text())
    del body["vocab_size"], body["eos_token_id"]
    for config in (str(folder), body):
        here = spec.model_copy(update={"model": ModelSpec(config=config), "out": str(tmp_path / f"{type(config)}")})
        curve = losses(here)
        assert curve[-1] < curve[0]
        exported = read_architecture(Path(here.out) / "model")
        assert exported.names == "gemma"
        assert exported.vocab_size == (512 if isinstance(config, str) else 96)


def test_talk_teaches_the_assistant_s_words(start: Start, tmp_path: Path) -> None:
    spec = start("llama3-mqa", dataset=None, steps=6)
    folder = Path(spec.init_from or "")
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "parser"}]
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 5)
    chat = ChatSpec(file=str(tmp_path / "talk.jsonl"), template=str(template))
    curve = losses(spec.model_copy(update={"chat": chat, "steps": 25}))
    assert curve[-1] < 0.1 < curve[0]
    model = Path(spec.out) / "model"
    assert (model / "chat_template.jinja").read_text() == template.read_text()
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    answer = LLM(model).chat([{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=8))
    assert answer.outputs[0].text == "parser"


def test_mfu_counts_the_prompts_which_are_computed_too(start: Start, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}<assistant>")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "parser"}]
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 5)
    chat = ChatSpec(file=str(tmp_path / "talk.jsonl"), template=str(template))
    spec = start("llama3-mqa", dataset=None, chat=chat, steps=1, export=False, peak_tflops=1.0, seq_len=64)
    _, targets = open_data(spec).examples(np.array([0]))
    learnt = np.flatnonzero(targets[0] != IGNORE)
    length = int(learnt[-1]) + 1
    results: list[StepResult] = []
    train_local(spec, on_step=results.append)
    done = results[0]
    assert done.mfu is not None
    assert done.tokens == spec.global_batch * len(learnt) < spec.global_batch * length / 2
    flops = spec.global_batch * length * flops_per_token(read_architecture(Path(spec.init_from or "")), length)
    assert done.mfu * done.step_s * 1e12 == pytest.approx(flops)


def talks(
    start: Start, tmp_path: Path, family: str, special: str, *questions: str, answer: str = "parser"
) -> TrainSpec:
    """A spec that tunes a family's model, whose tokenizer gets a special token, by conversations with an own template.
    Each answer ends with ~.
    """
    spec = start(family, dataset=None)
    tokenizer = Tokenizer.from_file(f"{spec.init_from}/tokenizer.json")
    tokenizer.add_special_tokens([special])
    tokenizer.save(f"{spec.init_from}/tokenizer.json")
    template, file = tmp_path / "own.jinja", tmp_path / "talks.jsonl"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}~{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [[{"role": "user", "content": each}, {"role": "assistant", "content": answer}] for each in questions]
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    return spec.model_copy(update={"chat": ChatSpec(file=str(file), template=str(template))})


def test_the_answers_of_a_base_model_that_learned_to_chat_end(start: Start, tmp_path: Path) -> None:
    """As with the base models of Llama, Qwen and SmolLM, whose files name only the token that ends a text."""
    spec = talks(start, tmp_path, "llama3-mqa", "~", *["hi"] * 5)
    folder, model = Path(spec.init_from or ""), Path(spec.out) / "model"
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.3}')
    losses(spec.model_copy(update={"steps": 25}))
    end = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("~")
    generation = json.loads((model / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [0, end], "temperature": 0.3}
    answer = LLM(model).chat([{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=8))
    assert (answer.outputs[0].text, answer.outputs[0].finish_reason) == ("parser", "stop")


def test_a_model_s_own_tokenizer_may_have_a_token_without_a_row(start: Start, tmp_path: Path) -> None:
    """As Gemma 3's, whose text models have 262,144 rows: its token for images has that number."""
    image = "<image_soft_token>"
    assert len(losses(talks(start, tmp_path, "gemma3", image, *["hi"] * 6))) == 4
    spec = talks(start, tmp_path, "gemma3", image, *["hi"] * 6, answer=image)
    with pytest.raises(DataError, match=r"has the id 512 in step 1, outside its vocabulary of 512"):
        losses(spec.model_copy(update={"out": str(tmp_path)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 300}, r"seq_len 300 is above the 256 positions"),
        ({"model": ModelSpec(config={"vocab_size": 40})}, r"vocab_size of 40, below the 96"),
        ({"model": ModelSpec(config={"intermediate_size": 100})}, r"has in another shape model\.layers\.0\.mlp"),
        ({"init_from": "nowhere"}, r"nowhere holds no model"),
        ({"init_from": "http://models/one"}, r"uses the protocol http, which is not supported"),
    ],
)
def test_what_does_not_fit_is_refused(start: Start, change: dict[str, Any], message: str) -> None:
    spec = start("llama3-mqa", **change)
    with process_group.single_process() as mine, pytest.raises((ConfigError, DataError), match=message):
        Trainer(spec, mine)


@pytest.mark.parametrize("below", ["", "/model"])
def test_a_model_in_an_object_store_is_copied_to_the_node_and_tuned(
    start: Start, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory, and the `out` of a run."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(storage, "REMOTE", storage.REMOTE | {"memory"})
    here = start("llama3-mqa", steps=2)
    url, fs = f"memory://models/{uuid.uuid4().hex}", fsspec.filesystem("memory")
    fs.put(f"{here.init_from}/", f"{url}{below}/", recursive=True)
    there = here.model_copy(update={"init_from": url, "out": str(tmp_path / "there")})
    assert losses(there) == losses(here)


def test_a_target_that_the_model_lacks_is_named(start: Start) -> None:
    spec = start("gpt2", finetune=FinetuneSpec(lora=LoraSpec(targets=("q_proj", "gate_proj"))))
    with (
        process_group.single_process() as mine,
        pytest.raises(ConfigError, match="no gate_proj that can have an adapter"),
    ):
        Trainer(spec, mine)


def test_another_tokenizer_needs_to_be_wanted(start: Start) -> None:
    spec = start("llama3-mqa")
    assert spec.dataset is not None
    (Path(spec.dataset) / "tokenizer.json").write_text('{"model": "another"}')
    with process_group.single_process() as mine:
        with pytest.raises(ConfigError, match="another tokenizer"):
            Trainer(spec, mine)
        path = Trainer(spec.model_copy(update={"other_tokenizer": True}), mine).export()
    assert (Path(path) / "tokenizer.json").read_text() == '{"model": "another"}'


def test_a_checkpoint_belongs_to_its_first_weights_and_its_adapters(start: Start, tmp_path: Path) -> None:
    spec = start("llama3-mqa", steps=1, export=False)
    losses(spec)
    moved = tmp_path / "moved"
    shutil.copytree(spec.init_from or "", moved)
    assert losses(spec.model_copy(update={"init_from": str(moved)})) == []  # done already: the same weights elsewhere
    torch.manual_seed(1)
    for other in (
        spec.model_copy(update={"init_from": str(start("mistral-window").init_from)}),
        spec.model_copy(update={"finetune": LORA}),
    ):
        with pytest.raises(CheckpointError, match="different model"):
            losses(other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give either dataset or chat"),
        ({"dataset": "d", "chat": {"file": "c"}}, "give either dataset or chat"),
        ({"chat": {"file": "c"}}, "chat.tokenizer is required"),
        ({"dataset": "d", "finetune": {"lora": {}}}, "finetune needs init_from"),
        ({"dataset": "d", "init_from": "m", "model": {"dim": 64}}, "init_from brings its own model config"),
        ({"dataset": "d", "init_from": "m", "model": {"config": "c"}}, "init_from brings its own model config"),
        ({"dataset": "d", "model": {"config": "c", "layers": 3}}, "layers cannot be combined with config"),
        ({"dataset": "d", "init_from": "m", "finetune": {"lora": {"targets": ["lm_head"]}}}, "q_proj"),
    ],
)
def test_specs_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainSpec.parse({"out": "o", "steps": 1, **fields}, where="spec")


def test_a_spec_survives_json() -> None:
    spec = TrainSpec(chat=ChatSpec(file="c"), init_from="m", finetune=LORA, out="o", steps=1)
    assert TrainSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_balanced_router_is_refused_where_it_would_not_be_seen_whole(start: Start) -> None:
    body = {"output_router_logits": True}
    spec = start("mixtral", model=ModelSpec(config=body), export=False)
    compiled = MemorySpec(compile=True, checkpointing="full")
    for change in ({"layout": Parallelism(tensor=2)}, {"layout": Parallelism(pipeline=2)}, {"memory": compiled}):
        other = spec.model_copy(update=change)
        with pytest.raises(ConfigError, match="balancing loss"):
            resolve_model(other, open_data(other))
    assert losses(spec)[-1] > 0
