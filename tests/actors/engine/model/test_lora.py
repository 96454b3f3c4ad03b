"""Adapters against the same weights merged into the model by hand; PEFT's files are written by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.actors.engine.families import save_family

from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.sequence import ScheduledChunk, Sequence
from raytide.actors.models.families import read_architecture
from raytide.core.errors import CapacityError, ConfigError, ConflictError, DataError, NotFoundError

PROMPT = [5, 9, 17, 300, 41, 6, 77, 8] * 3
ALL = {
    "llama2-mha-untied-biased": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gemma3": ["q_proj", "v_proj", "down_proj"],
    "phi3-longrope": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    "qwen3-moe": ["k_proj", "o_proj"],
}


def write_adapter(path: Path, model: Any, targets: list[str], rank: int = 4, seed: int = 0, **config: Any) -> Path:
    """An adapter for each module of `model` whose name ends with one of `targets`."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.endswith(tuple(targets)):
            rows, columns = shape_of(module)
            at = f"base_model.model.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.2
            weights[f"{at}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.2
    path.mkdir()
    body = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": targets, "bias": "none"} | config
    (path / "adapter_config.json").write_text(json.dumps(body))
    save_file(weights, path / "adapter_model.safetensors")
    return path


def shape_of(module: Any) -> tuple[int, int]:
    rows, columns = module.weight.shape
    return (columns, rows) if type(module).__name__ == "Conv1D" else (rows, columns)


def merged(model: Any, adapter: Path, scale: float) -> torch.Tensor:
    """The logits of the prompt with the adapter merged into the weights; the model is left as it was."""
    from safetensors.torch import load_file

    weights, modules = load_file(adapter / "adapter_model.safetensors"), dict(model.named_modules())
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    with torch.no_grad():
        for name in weights:
            if name.endswith("lora_A.weight"):
                delta = weights[name.replace("lora_A", "lora_B")] @ weights[name] * scale
                module = modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
                module.weight += delta.t() if type(module).__name__ == "Conv1D" else delta
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
        model.load_state_dict(before)
    return logits


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[ModelRunner, Any]]:
    def runner_and_reference(family: str, **options: Any) -> tuple[ModelRunner, Any]:
        path = tmp_path / family
        model = save_family(path, family)
        config = EngineConfig(model_dir=str(path), max_model_len=64, max_running=8, **options)
        return ModelRunner(config, read_architecture(path)), model

    return runner_and_reference


def sequence(row: int, lora: str | None, tokens: list[int] = PROMPT) -> Sequence:
    blocks = [2 * row, 2 * row + 1]
    return Sequence(
        f"s{row}", list(tokens), len(tokens), SamplingParams(), 64, frozenset(), 0, block_ids=blocks, lora=lora
    )


def last_logits(runner: ModelRunner, loras: list[str | None]) -> torch.Tensor:
    """The prompt once with each adapter, all in one step."""
    seqs = [sequence(row, lora) for row, lora in enumerate(loras)]
    logits = runner.logits([ScheduledChunk(seq, 0, len(PROMPT)) for seq in seqs])
    for seq in seqs:
        runner.release(seq)
    return logits


@pytest.mark.parametrize("family", ALL)
def test_adapters_in_one_batch_each_equal_their_merged_weights(
    family: str, start: Callable[..., tuple[ModelRunner, Any]], tmp_path: Path
) -> None:
    runner, model = start(family)
    plain = write_adapter(tmp_path / "plain", model, ALL[family], rank=4, seed=1)
    stable = write_adapter(tmp_path / "stable", model, ALL[family][:2], rank=9, seed=2, use_rslora=True)
    runner.load_lora("plain", plain)
    runner.load_lora("stable", stable)
    order: list[str | None] = ["stable", None, "stable", "plain", "plain", None, "plain"]
    logits = last_logits(runner, order)
    base = model(torch.tensor([PROMPT])).logits[0, -1]
    expected = {"plain": merged(model, plain, 8 / 4), "stable": merged(model, stable, 8 / math.sqrt(9)), None: base}
    assert (expected["plain"] - base).abs().max() > 0.1 and (expected["stable"] - base).abs().max() > 0.1
    for row, lora in enumerate(order):
        assert (logits[row] - expected[lora]).abs().max() < 1e-4


def test_grouped_chunks_give_each_sequence_its_own_token(
    start: Callable[..., tuple[ModelRunner, Any]], tmp_path: Path
) -> None:
    runner, model = start("llama3-mqa")
    runner.load_lora("a", write_adapter(tmp_path / "a", model, ["q_proj", "up_proj"], seed=3))
    seqs = [sequence(row, lora, PROMPT[row:]) for row, lora in enumerate(["a", None, "a", None])]
    chunks = [ScheduledChunk(seq, 0, len(seq.tokens)) for seq in seqs]
    alone = {seq.seq_id: runner.execute([chunk])[seq.seq_id] for seq, chunk in zip(seqs, chunks, strict=True)}
    assert runner.execute(chunks) == alone


def test_a_batch_without_adapters_computes_what_it_did_before_any_was_loaded(
    start: Callable[..., tuple[ModelRunner, Any]], tmp_path: Path
) -> None:
    runner, model = start("mistral-window")
    before = last_logits(runner, [None, None])
    runner.load_lora("a", write_adapter(tmp_path / "a", model, ["q_proj"]))
    assert torch.equal(last_logits(runner, [None, None]), before)


def test_an_adapter_comes_and_goes_while_others_stay(
    start: Callable[..., tuple[ModelRunner, Any]], tmp_path: Path
) -> None:
    runner, model = start("llama3-mqa", max_loras=2)
    paths = [write_adapter(tmp_path / name, model, ["o_proj"], seed=seed) for seed, name in enumerate("abc")]
    runner.load_lora("a", paths[0])
    first = last_logits(runner, ["a"])
    runner.load_lora("b", paths[1])
    with pytest.raises(ConflictError, match="a is already loaded"):
        runner.load_lora("a", paths[2])
    with pytest.raises(CapacityError, match="2 adapters are loaded"):
        runner.load_lora("c", paths[2])
    cached_as = runner.lora_id("b")
    runner.unload_lora("b")
    with pytest.raises(NotFoundError, match="adapter b is not loaded"):
        last_logits(runner, ["a", "b"])
    with pytest.raises(NotFoundError, match="adapter b"):
        runner.unload_lora("b")
    runner.load_lora("b", paths[2])
    assert runner.lora_id("b") != cached_as  # its KV is not that of the former b
    both = last_logits(runner, ["a", "b"])
    assert torch.allclose(both[:1], first, atol=1e-5)
    assert (both[1] - merged(model, paths[2], 2.0)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "pattern",
    [r"layers\.\d\.self_attn.o_proj", r"model\.layers\.\d\.self_attn\.o_proj", r"^model.layers.\d.self_attn.o_proj"],
)
def test_alpha_may_differ_by_module_and_rank_by_tensor(
    pattern: str, start: Callable[..., tuple[ModelRunner, Any]], tmp_path: Path
) -> None:
    runner, model = start("llama3-mqa")
    path = write_adapter(tmp_path / "a", model, ["o_proj"], rank=256, alpha_pattern={pattern: 64})
    runner.load_lora("a", path)
    assert (last_logits(runner, ["a"])[0] - merged(model, path, 64 / 256)).abs().max() < 1e-4


def test_the_prefix_cache_does_not_cross_adapters(tmp_path: Path) -> None:
    path = tmp_path / "model"
    model = save_family(path, "llama3-mqa")
    adapters = [
        write_adapter(tmp_path / name, model, ["q_proj", "v_proj"], seed=seed) for seed, name in enumerate("ab")
    ]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def answer(llm: LLM, lora: str | None) -> list[int]:
        return llm.generate([PROMPT], sampling, lora=lora)[0].outputs[0].token_ids

    def alone(adapter: Path) -> list[int]:
        llm = LLM(path, block_size=4)
        llm.load_lora("x", adapter)
        return answer(llm, "x")

    llm = LLM(path, block_size=4)
    base = answer(llm, None)
    seen = []
    for adapter in adapters:  # under one name, one after the other
        llm.load_lora("x", adapter)
        seen += [answer(llm, "x"), answer(llm, "x")]
        llm.unload_lora("x")
    first, second = alone(adapters[0]), alone(adapters[1])
    assert seen == [first, first, second, second]
    assert len({tuple(tokens) for tokens in (base, first, second)}) == 3
    assert answer(llm, None) == base
    assert llm.stats().cached_tokens > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "bias"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa"),
        ({"alora_invocation_tokens": [5, 9]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ],
)
def test_other_kinds_of_adapters_are_refused(
    config: dict[str, Any], message: str, start: Callable[..., tuple[ModelRunner, Any]], tmp_path: Path
) -> None:
    runner, model = start("llama3-mqa")
    with pytest.raises(ConfigError, match=f"{message}.* is not supported"):
        runner.load_lora("a", write_adapter(tmp_path / "a", model, ["o_proj"], **config))
    runner.load_lora("a", write_adapter(tmp_path / "good", model, ["o_proj"]))


def test_a_module_that_takes_no_adapter_is_named(start: Callable[..., tuple[ModelRunner, Any]], tmp_path: Path) -> None:
    runner, model = start("llama3-mqa")
    with pytest.raises(ConfigError, match=r"on lm_head here.*q_proj, k_proj, v_proj, o_proj, gate_proj"):
        runner.load_lora("a", write_adapter(tmp_path / "a", model, ["o_proj", "lm_head"]))
    with pytest.raises(ConfigError, match=r"rank 257 is not supported.*256"):
        runner.load_lora("a", write_adapter(tmp_path / "b", model, ["o_proj"], rank=257))


def test_an_adapter_of_another_model_is_refused(start: Callable[..., tuple[ModelRunner, Any]], tmp_path: Path) -> None:
    runner, _ = start("llama3-mqa")
    _, other = start("mistral-window")
    with pytest.raises(DataError, match=r"_proj.*has shape"):
        runner.load_lora("a", write_adapter(tmp_path / "a", other, ["q_proj", "o_proj"]))
    with pytest.raises(DataError, match=r"adapter_config\.json"):
        runner.load_lora("a", tmp_path / "nowhere")
