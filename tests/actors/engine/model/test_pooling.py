"""Embeddings and classification against transformers, computed in the schedule beside what generates."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.actors.engine.families import save_family
from tests.actors.engine.tiny import VOCAB
from tests.actors.models.quantized.gguf.gguf_files import field, header

from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.output_processor import PooledOutput, RequestFailure
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.actors.engine.model.input_batch import StepInputs
from raytide.actors.engine.model.pooling import pooling_of
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.sequence import PooledPrompt, Pooling
from raytide.actors.engine.types import GenChunk, GenRequest
from raytide.actors.models.families import read_architecture
from raytide.core.errors import ConfigError, DataError, EngineError, UsageError

GENERATED = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def core_of(path: Path, **options: object) -> EngineCore:
    """Returns an engine whose steps are so small that most prompts take several."""
    fields = {"max_model_len": 128, "block_size": 8, "max_running": 6, "max_batch_tokens": 24, "max_waiting": 999}
    return EngineCore(EngineConfig(model_dir=str(path), device="cpu", **{**fields, **options}))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["qwen3-tied", "gemma2", "gpt2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineCore, Any]:
    path = tmp_path_factory.mktemp(request.param)
    model = save_family(path, request.param)
    return core_of(path), model


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.choice([1, 7, 8, 9, 40]))] for _ in range(count)]


def pooled(
    core: EngineCore, whole: list[list[int]], pooling: Pooling, *, classify: bool = False, normalize: bool = True
) -> list[list[float]]:
    for index, prompt in enumerate(whole):
        request = GenRequest(request_id=f"p{index}", prompt=prompt)
        core.add_pooled(request, prompt, PooledPrompt(pooling, normalize, classify))
    vectors: dict[str, list[float]] = {}
    while core.has_work:
        for output in core.step():
            assert not isinstance(output, RequestFailure), output.error
            if isinstance(output, PooledOutput):
                vectors[output.request_id] = output.vector
                assert output.usage.prompt_tokens == len(whole[int(output.request_id[1:])])
    assert core.pool.num_free == core.pool.num_blocks
    return [vectors[f"p{index}"] for index in range(len(whole))]


def states_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_vectors_are_pooled_hidden_states(saved: tuple[EngineCore, Any], pooling: Pooling) -> None:
    core, model = saved
    whole = prompts(12)
    states = [states_of(model, prompt) for prompt in whole]
    expected = [{"cls": each[0], "last": each[-1], "mean": each.mean(0)}[pooling] for each in states]
    plain = pooled(core, whole, pooling, normalize=False)
    unit = pooled(core, whole, pooling)
    for want, vector, normal in zip(expected, plain, unit, strict=True):
        assert (torch.tensor(vector) - want).abs().max() < 1e-4
        assert (torch.tensor(normal) - want / want.norm()).abs().max() < 1e-5


def test_a_vector_does_not_depend_on_the_others_in_the_batch(saved: tuple[EngineCore, Any]) -> None:
    core, whole = saved[0], prompts(6)
    together = torch.tensor(pooled(core, whole, "mean"))
    alone = torch.tensor([pooled(core, [prompt], "mean")[0] for prompt in whole])
    assert torch.allclose(together, alone, atol=1e-5)


def test_what_generates_beside_them_has_the_same_tokens(saved: tuple[EngineCore, Any]) -> None:
    core, whole = saved[0], prompts(12)

    def tokens(others: list[list[int]]) -> list[int]:
        core.add(GenRequest(request_id="it", prompt=[5, 6, 7], sampling=GENERATED), [5, 6, 7])
        for index, prompt in enumerate(others):
            core.add_pooled(GenRequest(request_id=f"p{index}", prompt=prompt), prompt, PooledPrompt("mean"))
        found: list[int] = []
        while core.has_work:
            for output in core.step():
                found += output.token_ids if isinstance(output, GenChunk) else []
        return found

    assert tokens(whole) == tokens([])


@pytest.mark.parametrize("host_memory_gb", [0.0, 0.1])
def test_an_evicted_prompt_has_the_vector_of_one_that_was_not(tmp_path: Path, host_memory_gb: float) -> None:
    save_family(tmp_path, "qwen3-tied")
    prompt = [random.Random(3).randrange(1, VOCAB) for _ in range(90)]
    whole = pooled(core_of(tmp_path), [prompt], "mean")[0]
    core = core_of(tmp_path, num_blocks=14, host_memory_gb=host_memory_gb)
    core.add_pooled(GenRequest(request_id="it", prompt=prompt, priority=9), prompt, PooledPrompt("mean"))
    found: list[list[float]] = []
    for step in range(60):
        if step == 2:
            core.add(GenRequest(request_id="urgent", prompt=[4] * 60, sampling=GENERATED), [4] * 60)
        found += [each.vector for each in core.step() if isinstance(each, PooledOutput)]
    assert core.stats().preemptions > 0
    assert torch.allclose(torch.tensor(found), torch.tensor([whole]), atol=1e-5)


def test_a_corpus_of_prompts_leaves_the_cached_prefix_of_a_chat_alone(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3-tied")
    core, chat = core_of(tmp_path, num_blocks=16), [9] * 41

    def cached() -> int:
        core.add(GenRequest(request_id="chat", prompt=chat, sampling=SamplingParams(max_tokens=1)), chat)
        outputs = [each for _ in range(9) for each in core.step() if isinstance(each, GenChunk)]
        assert outputs[-1].usage is not None
        return outputs[-1].usage.cached_tokens

    assert cached() == 0
    pooled(core, prompts(40), "last")
    assert cached() == 40


def test_a_vector_that_is_not_finite_fails_its_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(tmp_path, "qwen3-tied")
    core = core_of(tmp_path)
    hidden, is_first = PagedDecoder.hidden, torch.tensor([[True], [False]])
    monkeypatch.setattr(PagedDecoder, "hidden", lambda *inputs: hidden(*inputs).masked_fill(is_first, float("nan")))
    for index in range(2):
        core.add_pooled(GenRequest(request_id=f"p{index}", prompt=[3, 4]), [3, 4], PooledPrompt("last"))
    failure, vector = core.step()
    assert isinstance(failure, RequestFailure)
    assert isinstance(failure.error, EngineError)
    assert isinstance(vector, PooledOutput)


def test_a_vector_that_is_not_finite_leaves_nothing_in_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family(tmp_path, "qwen3-tied")
    core, hidden = core_of(tmp_path), PagedDecoder.hidden

    def overflowing(self: PagedDecoder, step: StepInputs, cache: list[torch.Tensor]) -> torch.Tensor:
        states = hidden(self, step, cache)
        for kv in cache:
            kv[:, step.batch.slots_T] = float("nan")
        return states * float("nan")

    monkeypatch.setattr(PagedDecoder, "hidden", overflowing)
    core.add_pooled(GenRequest(request_id="p", prompt=[3] * 40), [3] * 40, PooledPrompt("mean"))
    outputs = [output for _ in range(2) for output in core.step()]
    assert [type(output) for output in outputs] == [RequestFailure]
    assert core.pool.num_free == core.pool.num_blocks
    assert all(kv.isfinite().all() for kv in core.runner.cache.layers)


@pytest.mark.parametrize(
    ("family", "labels"), [("llama2-mha-untied-biased", 1), ("qwen3-tied", 2), ("gemma2", 3), ("gpt2", 1)]
)
def test_a_classification_head_gives_the_logits_of_transformers(tmp_path: Path, family: str, labels: int) -> None:
    model = save_family(tmp_path, family, classifies=True, num_labels=labels)
    core, whole = core_of(tmp_path), prompts(6)
    assert (core.info.num_labels, "classification" in core.info.features) == (labels, True)
    with torch.inference_mode():
        expected = torch.cat([_logits_of_last(model, prompt) for prompt in whole])
    assert (torch.tensor(pooled(core, whole, "last", classify=True)) - expected).abs().max() < 1e-4


def _logits_of_last(model: Any, prompt: list[int]) -> torch.Tensor:
    """transformers asks for a padding token only where a batch has several prompts."""
    logits: torch.Tensor = model(torch.tensor([prompt])).logits
    return logits


def test_a_model_that_classifies_generates_nothing_and_is_no_base_for_anything_else(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3-tied", classifies=True)
    with pytest.raises(UsageError, match="classifies: it generates no text"):
        core_of(tmp_path).add(GenRequest(request_id="it", prompt=[5], sampling=GENERATED), [5])
    with pytest.raises(ConfigError, match="Qwen3ForSequenceClassification has a classification head"):
        read_architecture(tmp_path)


def test_the_pooling_is_what_the_directory_says(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == "last"
    config = tmp_path / "1_Pooling" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}))
    assert pooling_of(tmp_path) == "mean"
    config.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigError, match="pooling_mode_max_tokens is not supported"):
        pooling_of(tmp_path)


def test_a_vector_by_more_modules_than_are_computed_is_refused(tmp_path: Path) -> None:
    def write(*kinds: str) -> None:
        modules = [{"idx": at, "name": str(at), "path": "", "type": kind} for at, kind in enumerate(kinds)]
        (tmp_path / "modules.json").write_text(json.dumps(modules))

    at = "sentence_transformers.models."
    write(f"{at}Transformer", f"{at}Pooling", f"{at}Normalize")
    assert pooling_of(tmp_path) == "last"
    write(f"{at}Transformer", f"{at}Pooling", f"{at}Dense")  # as stella_en_1.5B_v5
    with pytest.raises(ConfigError, match="the module Dense is not supported"):
        pooling_of(tmp_path)
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(DataError, match=r"modules\.json is not valid JSON"):
        pooling_of(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_untied_model_that_was_saved_without_its_head_embeds(tmp_path: Path, ranks: int) -> None:
    """As Qwen3-Embedding-8B."""
    model = save_family(tmp_path, "qwen3-tied", tie_word_embeddings=False)
    config = (tmp_path / "config.json").read_text()
    model.base_model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    core, whole = core_of(tmp_path, tensor_parallel=ranks), prompts(4)
    try:
        for prompt, vector in zip(whole, pooled(core, whole, "last", normalize=False), strict=True):
            assert (torch.tensor(vector) - states_of(model, prompt)[-1]).abs().max() < 1e-4
    finally:
        core.close()


def test_the_pooling_of_a_gguf_file_is_the_one_it_names(tmp_path: Path) -> None:
    def named(kind: int | None) -> Path:
        path, fields = tmp_path / f"{kind}.gguf", [field("general.architecture", "qwen2")]
        path.write_bytes(header(fields if kind is None else [*fields, field("qwen2.pooling_type", kind)]))
        return path

    found = [pooling_of(named(kind)) for kind in (None, 0, 1, 2, 3)]
    assert found == ["last", "last", "mean", "cls", "last"]
    with pytest.raises(ConfigError, match=r"qwen2\.pooling_type 4 is not supported"):
        pooling_of(named(4))
