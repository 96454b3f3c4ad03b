"""A pipeline of processes, each with some of the layers: the tokens and logits of one process to the bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tests.actors.engine.test_tensor_parallel import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    SMALL,
    answers,
    members,
    nothing_is_left,
)
from tests.actors.engine.tiny import save_llama
from tests.actors.models.quantized.quantized_models import save_quantized
from tests.actors.models.quantized.test_engine_options import INT8, int8

from raytide.actors.engine import LLM, EngineConfig, GenRequest, NativeEngine
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.operations import export_kv, import_kv
from raytide.actors.engine.kv_cache.handle import KvHandle
from raytide.core.errors import ConfigError, EngineDeadError

__all__ = ["nothing_is_left"]  # a fixture, for each test here


@pytest.mark.usefixtures("free_drafts")
@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_stages_give_the_answers_of_one_process_to_the_bit(stages: int, tmp_path: Path) -> None:
    """With prefills in chunks, evictions to host memory, prefix hits, drafts and other weights."""
    model, other = tmp_path / "model", tmp_path / "other"
    save_llama(model, num_hidden_layers=5)
    save_llama(other, num_hidden_layers=5, initializer_range=0.3)
    alone, group = (
        LLM(model, pipeline_parallel=each, speculation="ngram", deterministic=True, **SMALL)  # type: ignore[arg-type]
        for each in (1, stages)
    )
    try:
        assert len(members()) == stages - 1
        expected = answers(alone)
        assert answers(group) == expected
        assert answers(group) == expected, "from the prefix cache"
        assert group.stats().preemptions > 0
        drafted = [llm.generate([[5, 6, 7, 8] * 6], GREEDY)[0].outputs[0].token_ids for llm in (alone, group)]
        assert drafted[0] == drafted[1]
        assert group.stats().speculation[0].draft_tokens > 0
        assert torch.equal(group.logits([5, 6, 7, 8]), alone.logits([5, 6, 7, 8]))
        assert group.embed(PROMPTS[:3]) == alone.embed(PROMPTS[:3])
        assert alone.load_weights(other) == group.load_weights(other)
        changed = answers(alone)
        assert changed != expected
        assert answers(group) == changed
    finally:
        group.close()


@pytest.mark.parametrize("save", ["plain", "int8"])
def test_stages_compute_bfloat16_and_quantized_models(save: str, tmp_path: Path) -> None:
    if save == "plain":
        save_llama(tmp_path, tie_word_embeddings=True)
    else:
        save_quantized(tmp_path, int8, INT8)
    alone, group = (LLM(tmp_path, pipeline_parallel=each, dtype="bfloat16", quantized_input="int8") for each in (1, 3))
    try:
        assert torch.equal(group.logits([5, 6, 7, 8] * 5), alone.logits([5, 6, 7, 8] * 5))
        assert group.info.quantization == alone.info.quantization
    finally:
        group.close()


@pytest.mark.soak
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 2), (4, 1), (1, 4), (2, 4)])
def test_heads_and_layers_shared_give_the_same_tokens(tensor: int, pipeline: int, tmp_path: Path) -> None:
    save_llama(tmp_path, num_hidden_layers=5)
    alone = LLM(tmp_path, **SMALL)  # type: ignore[arg-type]
    group = LLM(tmp_path, tensor_parallel=tensor, pipeline_parallel=pipeline, **SMALL)  # type: ignore[arg-type]
    try:
        assert answers(group) == answers(alone)
        torch.testing.assert_close(group.logits([5, 6, 7]), alone.logits([5, 6, 7]), rtol=1e-5, atol=1e-5)
    finally:
        group.close()


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_requests_move_between_one_process_and_stages_of_unequal_size(tensor: int, model_dir: Path) -> None:
    def start(stages: int, size: int) -> EngineCore:
        fields = {"model_dir": str(model_dir), "block_size": 4, "max_batch_tokens": 16, "max_running": 4}
        shape = {"tensor_parallel": size, "pipeline_parallel": stages}
        return EngineCore(EngineConfig.parse(fields | shape, where="test"))

    def run(core: EngineCore, steps: int) -> list[int]:
        return [token for _ in range(steps) for output in core.step() for token in output.token_ids]  # type: ignore[union-attr]

    prompt = list(range(40, 75))
    request = GenRequest(request_id="r", prompt=prompt, sampling=SAMPLED)
    alone, group = start(1, 1), start(2, tensor)  # three layers: one and two
    alone.add(request, prompt)
    expected = run(alone, 30)
    try:
        for here, there in ((alone, group), (group, alone)):
            here.add(request, prompt)
            first = run(here, 8)
            handle = KvHandle.from_bytes(export_kv(here, "r").to_bytes())
            here.drain_outputs()
            import_kv(there, handle, request, prompt)
            assert len(there.scheduler.running) == 1, "it has its KV"
            assert first + run(there, 30) == expected
    finally:
        group.runner.close()


async def test_stages_wake_with_their_weights_and_the_end_of_one_ends_all(model_dir: Path) -> None:
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir), pipeline_parallel=3))
    assert "lora" in (await engine.start()).features

    async def answer(name: str, count: int = 24) -> list[int]:
        request = GenRequest(request_id=name, prompt=[5, 6, 7], sampling=GREEDY)
        return [token async for chunk in engine.generate(request) for token in chunk.token_ids][:count]

    before = await answer("1")
    await engine.sleep(2)
    await engine.wake()
    assert await answer("2") == before
    others = members()
    assert len(others) == 2
    others[0].kill()

    async def until_dead() -> None:
        while True:
            await answer("3")

    with pytest.raises(EngineDeadError, match="member 1 of this replica has ended"):
        await asyncio.wait_for(until_dead(), 120)
    await engine.shutdown()


def test_more_stages_than_layers_are_refused_before_any_starts(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel 4 is more than the model's 3 layers"):
        LLM(model_dir, pipeline_parallel=4)
    assert members() == []
