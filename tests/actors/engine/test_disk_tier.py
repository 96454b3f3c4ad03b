"""An engine with a KV cache on disk answers as one without, in less computation."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_adapter, save_llama

from raytide.actors.engine import LLM, EngineConfig, GenRequest, NativeEngine, SamplingParams
from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.kv_cache.block_folder import BlockFolder
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.types import CompletionOutput, DiskCounts
from raytide.core.errors import ConfigError

PROMPTS = [[(13 * i + j) % 400 + 1 for j in range(60 + i)] for i in range(6)]
SAMPLING = [
    SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=8, temperature=0.9, seed=5, top_p=0.9, ignore_eos=True, logprobs=2),
]
SMALL = {"block_size": 4, "num_blocks": 24, "max_model_len": 90, "deterministic": True}


@pytest.fixture(autouse=True)
def reading_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a model that is large beside the disk; the tiny one is computed faster than a file is opened."""
    monkeypatch.setattr(ModelRunner, "prefill_token_s", 1.0)
    monkeypatch.setattr("raytide.actors.engine.kv_cache.disk_tier._LEAST_TOKENS", 1 << 30)


@pytest.fixture
def llms() -> Iterator[list[LLM]]:
    made: list[LLM] = []
    yield made
    for llm in made:
        llm.close()


def answers(llm: LLM) -> list[list[CompletionOutput]]:
    both = [llm.generate([prompt], each)[0] for prompt in PROMPTS for each in SAMPLING]
    return [each.outputs for each in both]


def let_write(llm: LLM) -> None:
    """Waits until no file is being written."""
    assert llm._core.disk is not None
    llm._core.disk.flush(60.0)


def disk(llm: LLM) -> DiskCounts:
    found = llm.stats().disk
    assert found is not None
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_dtype": "int8"}, {"tensor_parallel": 2}, {"host_memory_gb": 1e-4}, {"speculation": "ngram"}],
    ids=str,
)
def test_tokens_and_logits_are_those_without_a_disk_to_the_bit(
    options: dict[str, object], model_dir: Path, tmp_path: Path, llms: list[LLM]
) -> None:
    common = SMALL | options
    llms += [LLM(model_dir, **common), LLM(model_dir, local_disk=f"file://{tmp_path}/kv", **common)]  # type: ignore[arg-type]
    plain, stored = llms
    expected = answers(plain)
    assert answers(stored) == expected
    let_write(stored)
    assert disk(stored).bytes > 0
    assert answers(stored) == expected
    assert disk(stored).hit_tokens > 100, "memory holds one of six prompts"
    stored.close()
    llms.append(again := LLM(model_dir, local_disk=str(tmp_path / "kv"), **common))  # type: ignore[arg-type]
    assert again.info.local_disk == stored.info.local_disk
    assert answers(again) == expected
    counts, stats = disk(again), again.stats()
    assert counts.hit_tokens > 100 and stats.cached_tokens > plain.stats().cached_tokens
    assert (stats.failed, counts.damaged_blocks, counts.is_on) == (0, 0, True)


def test_a_prefix_on_the_disk_counts_as_cached(model_dir: Path, tmp_path: Path, llms: list[LLM]) -> None:
    common = SMALL | {"local_disk": str(tmp_path / "kv")}
    llms.append(first := LLM(model_dir, **common))  # type: ignore[arg-type]
    first.generate([PROMPTS[0]], SAMPLING[0])
    in_memory = operations.cached_prefix(first._core, PROMPTS[0], None, "")
    assert in_memory == (len(PROMPTS[0]) - 1) // 4 * 4
    first.close()
    llms.append(again := LLM(model_dir, **common))  # type: ignore[arg-type]
    assert operations.cached_prefix(again._core, PROMPTS[0], None, "") == in_memory
    again.generate([PROMPTS[0]], SAMPLING[0])
    assert again.stats().cached_tokens == in_memory


def test_many_at_once_share_what_is_read(model_dir: Path, tmp_path: Path, llms: list[LLM]) -> None:
    options = {"block_size": 4, "deterministic": True, "local_disk": str(tmp_path / "kv")}
    llms.append(first := LLM(model_dir, **options))  # type: ignore[arg-type]
    expected = first.generate(PROMPTS, SAMPLING[0])
    first.close()
    llms.append(again := LLM(model_dir, **options))  # type: ignore[arg-type]
    found = again.generate(PROMPTS * 3, SAMPLING[0])
    assert [each.outputs for each in found] == [each.outputs for each in expected] * 3
    prefixes = {tuple(prompt[:at]) for prompt in PROMPTS for at in range(4, len(prompt), 4)}
    assert disk(again).hit_tokens == 4 * len(prefixes)


def test_tenants_adapters_and_weights_do_not_share(model_dir: Path, tmp_path: Path, llms: list[LLM]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_llama(other, initializer_range=0.3)
    options = SMALL | {"local_disk": str(tmp_path / "kv"), "num_blocks": 100}

    def engine() -> LLM:
        for llm in llms:
            llm.close()
        llms.append(LLM(model_dir, **options))  # type: ignore[arg-type]
        return llms[-1]

    def hits(llm: LLM, **fields: object) -> int:
        before = disk(llm).hit_tokens
        core, prompt = llm._core, PROMPTS[0]
        core.add(GenRequest(request_id="r", prompt=prompt, sampling=SAMPLING[0], **fields), prompt)  # type: ignore[arg-type]
        while core.has_work:
            core.step()
        return disk(llm).hit_tokens - before

    adapters = [save_adapter(tmp_path / f"adapter{seed}", seed) for seed in (1, 2)]
    first = engine()
    first.load_lora("a", adapters[0])
    assert hits(first, cache_salt="one") == hits(first, lora="a") == 0
    again = engine()
    again.load_lora("a", adapters[1])
    assert hits(again, cache_salt="two") == hits(again, lora="a") == 0
    assert hits(again, cache_salt="one") == 56
    again.unload_lora("a")
    again.load_lora("a", adapters[0])
    assert hits(again, lora="a") == 56
    path = disk(again).path
    again.load_weights(other)
    assert disk(again).path != path
    assert hits(again, cache_salt="one") == 0
    again.load_weights(model_dir)
    assert (disk(again).path, hits(again, cache_salt="one")) == (path, 56)
    engine().close()
    weights = model_dir / "model.safetensors"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert weights.exists()
    llms.append(touched := LLM(copy, **options))  # type: ignore[arg-type]
    assert touched.info.local_disk != path, "files that were written to since are others"


@pytest.mark.parametrize("trouble", ["full", "damaged", "gone", "hangs"])
def test_no_request_fails_by_the_disk(
    trouble: str, model_dir: Path, tmp_path: Path, llms: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llms += [LLM(model_dir, **SMALL), LLM(model_dir, local_disk=str(tmp_path / "kv"), **SMALL)]  # type: ignore[arg-type]
    plain, stored = llms
    expected = answers(plain)
    assert answers(stored) == expected
    let_write(stored)
    folder = Path(disk(stored).path)
    if trouble == "full":

        def no_room(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(BlockFolder, "_store", no_room)
        stored.generate([[7] * 80], SAMPLING[0])
    elif trouble == "hangs":
        monkeypatch.setattr("raytide.actors.engine.kv_cache.disk_tier._HANG_S", -1e9)
        monkeypatch.setattr(BlockFolder, "read", lambda *_: threading.Event().wait(5.0))
    for file in folder.iterdir() if trouble in ("damaged", "gone") else ():
        if trouble == "gone":
            file.unlink()
        else:
            body = bytearray(file.read_bytes())
            body[-1] ^= 1
            file.write_bytes(body)
    assert answers(stored) == expected
    assert stored.stats().failed == 0
    let_write(stored)
    assert disk(stored).is_on == (trouble in ("damaged", "gone"))
    if trouble == "damaged":
        assert disk(stored).damaged_blocks > 0


def test_a_request_that_is_aborted_while_it_waits_for_the_disk_leaves_nothing(
    model_dir: Path, tmp_path: Path, llms: list[LLM]
) -> None:
    llms.append(llm := LLM(model_dir, local_disk=str(tmp_path / "kv"), **SMALL))  # type: ignore[arg-type]
    answers(llm)
    let_write(llm)
    core = llm._core
    core.add(GenRequest(request_id="r", prompt=PROMPTS[0], sampling=SAMPLING[0]), PROMPTS[0])
    plan = core.scheduler.plan()
    assert not plan.chunks and core.has_work and core.stats().waiting == 1
    assert core.abort("r")
    assert not core.has_work and core.drain_outputs()
    core.pool.check([])
    assert [each.outputs for each in llm.generate([PROMPTS[0]], SAMPLING[0])] == [
        each.outputs for each in llm.generate([PROMPTS[0]], SAMPLING[0])
    ]


async def test_an_engine_that_wakes_or_starts_again_reads_what_it_had(model_dir: Path, tmp_path: Path) -> None:
    config = EngineConfig(model_dir=str(model_dir), block_size=4, local_disk=str(tmp_path / "kv"))

    async def answer(engine: NativeEngine, name: str) -> list[int]:
        request = GenRequest(request_id=name, prompt=PROMPTS[0], sampling=SAMPLING[0])
        return [token async for chunk in engine.generate(request) for token in chunk.token_ids]

    engine = NativeEngine(config)
    await engine.start()
    expected = await answer(engine, "1")
    await engine.sleep(1)
    await engine.wake()
    assert await answer(engine, "2") == expected
    counts = (await engine.stats()).disk
    assert counts is not None and counts.hit_tokens == 56
    await engine.shutdown()
    again = NativeEngine(config)
    await again.start()
    assert await answer(again, "3") == expected
    counts = (await again.stats()).disk
    assert counts is not None and counts.hit_tokens >= 56
    await again.shutdown()


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        LLM(model_dir, local_disk=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be used"):
        LLM(model_dir, local_disk=str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="prefix_cache is off"):
        LLM(model_dir, local_disk=str(tmp_path), prefix_cache=False)
    with pytest.raises(ConfigError, match="max_local_disk_size is 1000 bytes"):
        LLM(model_dir, local_disk=str(tmp_path), max_local_disk_size=1e-6)
