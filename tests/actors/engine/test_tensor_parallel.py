"""Several processes that compute one model: the same tokens as one, and one end for all."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from tests.actors.engine.model.test_lora import write_adapter
from tests.actors.engine.tiny import save_llama
from tests.actors.models.quantized.quantized_models import save_quantized
from tests.actors.models.quantized.test_compressed_tensors import config_of, quantizer

from raytide.actors.engine import LLM, EngineConfig, GenRequest, NativeEngine, SamplingParams
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.operations import export_kv, import_kv
from raytide.actors.engine.kv_cache.handle import KvHandle
from raytide.actors.engine.model.parallel.decoder import ShardedDecoder
from raytide.actors.engine.model.parallel.launcher import Invitation, LocalMembers
from raytide.core.errors import ConfigError, DataError, EngineDeadError

PROMPTS = ["import os", "def main(", "class Tide:\n    def", "for x in range("] * 2
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=24, repetition_penalty=1.1)
ALL_PROJECTIONS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
SMALL = {"max_batch_tokens": 16, "max_running": 8, "block_size": 8, "num_blocks": 14, "host_memory_gb": 0.001}


def members() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if is_member(each)]


def is_member(process: psutil.Process) -> bool:
    try:
        return any("parallel.member" in word for word in process.cmdline())
    except psutil.NoSuchProcess:  # it ended; what another test started may be a zombie for long
        return False


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    _, alive = psutil.wait_procs(members(), timeout=120)
    assert not alive


def answers(llm: LLM) -> list[list[int]]:
    both = llm.generate(PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SAMPLED] * len(PROMPTS))
    return [each.outputs[0].token_ids for each in both]


def interrupted(self: ShardedDecoder, hidden_RN: torch.Tensor, head: object = ShardedDecoder.head) -> torch.Tensor:
    signal.raise_signal(signal.SIGINT)
    return head(self, hidden_RN)  # type: ignore[operator, no-any-return]


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """As in a program, whatever handler an earlier test of this process left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("free_drafts")
def test_two_members_give_the_tokens_of_one(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefills in chunks, evictions to host memory, prefix hits, drafts and other weights."""
    save_llama(tmp_path, initializer_range=0.3)
    alone, group = (
        LLM(model_dir, tensor_parallel=each, speculation="ngram", **SMALL)  # type: ignore[arg-type]
        for each in (1, 2)
    )
    try:
        assert len(members()) == 1
        expected = answers(alone)
        assert answers(group) == expected
        assert answers(group) == expected, "from the prefix cache"
        assert group.stats().preemptions > 0
        drafted = [llm.generate([[5, 6, 7, 8] * 6], GREEDY)[0].outputs[0].token_ids for llm in (alone, group)]
        assert drafted[0] == drafted[1]
        assert group.stats().speculation[0].draft_tokens > 0
        torch.testing.assert_close(group.logits([5, 6, 7, 8]), alone.logits([5, 6, 7, 8]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*(torch.tensor(each.embed(PROMPTS[:3])) for each in (group, alone)))
        assert alone.load_weights(tmp_path) == group.load_weights(tmp_path)
        other = answers(alone)
        assert other != expected
        assert answers(group) == other
        with monkeypatch.context() as patch, ctrl_c_raises():
            patch.setattr(ShardedDecoder, "head", interrupted)
            with pytest.raises(KeyboardInterrupt):
                answers(group)
        assert answers(group) == other, "Ctrl-C in the middle of a step ends the call alone"
    finally:
        group.close()
    with pytest.raises(EngineDeadError, match="has been closed"):
        group.generate(["x"], GREEDY)


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str)
def test_adapters_of_two_members_give_the_tokens_of_one(
    options: dict[str, int], model_dir: Path, tmp_path: Path
) -> None:
    """Also on quantized weights they are added by the same code."""
    model = save_llama(tmp_path / "model")
    paths = [write_adapter(tmp_path / f"a{seed}", model, ALL_PROJECTIONS, seed=seed) for seed in range(2)]
    alone, group = LLM(model_dir), LLM(model_dir, **options)  # type: ignore[arg-type]

    def answers_of(llm: LLM, *loras: str | None) -> list[list[int]]:
        return [answer.outputs[0].token_ids for each in loras for answer in llm.generate(PROMPTS, GREEDY, lora=each)]

    try:
        for llm in (alone, group):
            for seed, path in enumerate(paths):
                llm.load_lora(f"a{seed}", path)
        expected = answers_of(alone, None, "a0", "a1")
        assert len({str(expected[at : at + len(PROMPTS)]) for at in range(0, len(expected), len(PROMPTS))}) == 3
        assert answers_of(group, None, "a0", "a1") == expected
        group.unload_lora("a0")
        group.load_lora("a0", paths[1])
        assert answers_of(group, "a0") == answers_of(group, "a1")
        with pytest.raises(DataError, match="cannot be read"):
            group.load_lora("b", tmp_path / "missing")
        (tmp_path / "a0" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
        with pytest.raises(ConfigError, match="use_dora is not supported"):
            group.load_lora("b", tmp_path / "a0")
        assert answers_of(group, "a1") == answers_of(alone, "a1"), "a refusal changes nothing"
    finally:
        group.close()


def test_two_members_compute_a_quantized_model_with_int8_inputs(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    config = config_of("pack-quantized", weights, {})
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    save_quantized(tmp_path, quantizer("pack-quantized", weights), config, **sizes)
    alone, group = (LLM(tmp_path, tensor_parallel=each, quantized_input="int8") for each in (1, 2))
    try:
        assert group.info.quantization == alone.info.quantization
        assert "int4" in group.info.quantization and "int8 inputs" in group.info.quantization
        near, far = alone.logits([5, 6, 7, 8]), group.logits([5, 6, 7, 8])
        assert (near - far).abs().max() < 0.02 * near.abs().max(), (
            "one number rounds the other way at most now and then"
        )
        assert answers(group)
    finally:
        group.close()


@pytest.mark.soak
def test_four_members_that_share_two_kv_heads_give_the_tokens_of_one(model_dir: Path) -> None:
    alone, group = (LLM(model_dir, tensor_parallel=each, deterministic=True) for each in (1, 4))
    try:
        assert len(members()) == 3
        found, expected = (
            [each.outputs[0].token_ids for each in llm.generate(PROMPTS[:2], [GREEDY, SAMPLED])]
            for llm in (group, alone)
        )
        assert found == expected
    finally:
        group.close()


def test_requests_move_between_one_process_and_two(model_dir: Path) -> None:
    def start(size: int) -> EngineCore:
        fields = {"model_dir": str(model_dir), "block_size": 4, "max_batch_tokens": 16, "tensor_parallel": size}
        return EngineCore(EngineConfig.parse(fields | {"max_running": 4}, where="test"))

    def run(core: EngineCore, steps: int) -> list[int]:
        return [token for _ in range(steps) for output in core.step() for token in output.token_ids]  # type: ignore[union-attr]

    prompt = list(range(40, 75))
    request = GenRequest(request_id="r", prompt=prompt, sampling=SAMPLED)
    alone, group = start(1), start(2)
    alone.add(request, prompt)
    expected = run(alone, 30)
    try:
        for here, there in ((alone, group), (group, alone)):
            here.add(request, prompt)
            first = run(here, 8)
            handle = KvHandle.from_bytes(export_kv(here, "r").to_bytes())
            here.drain_outputs()
            assert handle.header.num_computed > len(prompt)
            import_kv(there, handle, request, prompt)
            assert len(there.scheduler.running) == 1, "it has its KV"
            assert first + run(there, 30) == expected
    finally:
        group.runner.close()


async def test_members_wake_with_their_weights_and_an_idle_engine_notices_a_killed_one(model_dir: Path) -> None:
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir), tensor_parallel=2))
    assert "lora" in (await engine.start()).features

    async def answer(name: str) -> list[int]:
        request = GenRequest(request_id=name, prompt=[5, 6, 7], sampling=GREEDY)
        return [token async for chunk in engine.generate(request) for token in chunk.token_ids]

    async def until_dead() -> None:
        while True:
            await engine.stats()
            await asyncio.sleep(0.01)

    before = await answer("1")
    await engine.sleep(2)
    await engine.wake()
    assert await answer("2") == before
    members()[0].kill()
    with pytest.raises(EngineDeadError, match="member 1 of this replica has ended"):
        await asyncio.wait_for(until_dead(), 120)
    await engine.shutdown()


def test_what_members_cannot_share_is_refused_before_any_starts(tmp_path: Path) -> None:
    save_llama(tmp_path)
    with pytest.raises(ConfigError, match="does not divide the model's 4 heads"):
        LLM(tmp_path, tensor_parallel=3)
    assert members() == []


def test_a_group_that_has_ended_gives_its_threads_back(model_dir: Path) -> None:
    """Else each engine of a process would compute with a fraction of the threads of the one before."""
    seen = list[int]()

    class Nowhere(LocalMembers):
        def launch(self, invitation: Invitation) -> None:
            seen.append(torch.get_num_threads())
            raise OSError("no member starts here")

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(2):
            config = EngineConfig(model_dir=str(model_dir), tensor_parallel=2)
            with pytest.raises(OSError, match="no member"):
                EngineCore(config, Nowhere(range(1, 2), local_size=2))
        assert (seen, torch.get_num_threads()) == ([2, 2], 4)
    finally:
        torch.set_num_threads(before)
