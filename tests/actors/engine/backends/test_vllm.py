"""vLLM computes what raytide's own engine computes, and refuses what it cannot before vLLM sees it."""

import asyncio
import json
import os
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from tests.actors.engine.model.test_lora import write_adapter
from tests.actors.engine.tiny import VOCAB
from tests.actors.engine.vllm_cores import MAX_LEN, SharedCores, needs_vllm
from transformers import LlamaForCausalLM

from raytide.actors.engine import LLM, GenChunk, GenRequest, SamplingParams, Structured
from raytide.actors.engine.backends.vllm import launch
from raytide.actors.engine.backends.vllm.config import VllmConfig, engine_arguments
from raytide.actors.engine.backends.vllm.engine import VllmEngine
from raytide.actors.engine.base import Engine
from raytide.core.errors import ConfigError, ConflictError, DataError, NotFoundError, UsageError

# vLLM belongs to the event loop it was started on.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = list(range(10, 22))
NEW_TOKENS = 16
TIE = 1e-4


async def collect(
    engine: Engine, name: str, prompt: list[int], sampling: SamplingParams, **more: object
) -> list[GenChunk]:
    request = GenRequest(request_id=name, prompt=prompt, sampling=sampling, **more)  # type: ignore[arg-type]
    return [chunk async for chunk in engine.generate(request)]


def tokens_of(chunks: list[GenChunk], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


def text_of(chunks: list[GenChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.fixture(scope="module")
def native(wide_model_dir: Path) -> LLM:
    return LLM(wide_model_dir, max_model_len=MAX_LEN)


@needs_vllm
async def test_greedy_tokens_are_the_native_engine_s(vllm_cores: SharedCores, native: LLM) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 100))] for _ in range(50)]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine = vllm_cores.engine()
    await engine.start()
    answers = await asyncio.gather(*(collect(engine, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)))
    own = [tokens_of(chunks) for chunks in answers]
    ours = [answer.token_ids for answer in native.generate(prompts, sampling)]
    different = [i for i in range(50) if own[i] != ours[i] and not is_tie(native, prompts[i], own[i], ours[i])]
    assert not different


def is_tie(native: LLM, prompt: list[int], one: list[int], other: list[int]) -> bool:
    """Returns whether the first different token was chosen among two that are as good as equal."""
    at = next(i for i in range(NEW_TOKENS) if one[i] != other[i])
    best = native.logits(prompt + one[:at])[-1].topk(2).values
    return bool(best[0] - best[1] < TIE)


@needs_vllm
async def test_log_probabilities_are_the_native_engine_s(vllm_cores: SharedCores, native: LLM) -> None:
    prompt = [5, 9, 17, 300, 41, 6, 77, 8]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    engine = vllm_cores.engine()
    await engine.start()
    chunks = await collect(engine, "r", prompt, sampling)
    [expected] = native.generate([prompt], sampling)
    found = [each for chunk in chunks for each in chunk.logprobs or ()]
    assert expected.logprobs is not None
    assert [each.token_id for each in found] == [each.token_id for each in expected.logprobs]
    for mine, theirs in zip(found, expected.logprobs, strict=True):
        assert mine.rank == theirs.rank
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)
    [of_prompt] = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs]
    assert of_prompt[0] is None
    assert expected.prompt_logprobs is not None
    assert [each.logprob for each in of_prompt[1:] if each] == pytest.approx(
        [each.logprob for each in expected.prompt_logprobs[1:] if each], abs=1e-4
    )


PAIR = Structured("json_schema", '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}')


@needs_vllm
@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        (Structured("choice", ("yes", "no")), "yes|no"),
        (Structured("regex", "[0-9]{3}x"), "[0-9]{3}x"),
        (Structured("grammar", 'root ::= "ab" | "cd"'), "ab|cd"),
        (Structured("json_schema", json.dumps({"enum": ["a", "b"]})), '"[ab]"'),
        (PAIR, r"\[[12],[12]\]"),
    ],
)
async def test_output_matches_what_was_asked(vllm_cores: SharedCores, structured: Structured, pattern: str) -> None:
    engine = vllm_cores.engine()
    await engine.start()
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=40, structured=structured)
    chunks = await collect(engine, "r", [5, 6, 7], sampling)
    assert chunks[-1].finish_reason == "stop"
    assert re.fullmatch(pattern, text_of(chunks))


@needs_vllm
async def test_a_bad_pattern_is_the_request_s_fault_alone(vllm_cores: SharedCores) -> None:
    engine = vllm_cores.engine()
    await engine.start()
    other = asyncio.create_task(collect(engine, "other", [5, 6], SamplingParams(max_tokens=30, ignore_eos=True)))
    with pytest.raises(UsageError, match="bad"):
        await collect(engine, "bad", [5, 6], SamplingParams(structured=Structured("regex", "[0-9")))
    assert (await other)[-1].finish_reason == "length"
    assert (await engine.stats()).failed == 1


@needs_vllm
async def test_bad_words_are_not_said(vllm_cores: SharedCores) -> None:
    engine = vllm_cores.engine()
    await engine.start()
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    said = text_of(await collect(engine, "free", PROMPT, free))
    word = next(each for each in said.split() if each.isascii())
    bound = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=(word,))
    assert word not in text_of(await collect(engine, "bound", PROMPT, bound)).split()


@needs_vllm
async def test_adapters_give_the_native_engine_s_tokens(
    vllm_cores: SharedCores, wide_model_dir: Path, tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(wide_model_dir)
    path = str(write_adapter(tmp_path / "adapter", model, ["q_proj", "v_proj", "o_proj", "down_proj"]))
    prompt, sampling = list(range(20, 60)), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(wide_model_dir, max_model_len=MAX_LEN)
    llm.load_lora("poet", path)
    [expected] = llm.generate([prompt], sampling, lora="poet")
    engine = vllm_cores.engine()
    await engine.start()
    with pytest.raises(NotFoundError, match="poet"):
        await collect(engine, "early", prompt, sampling, lora="poet")
    with pytest.raises(DataError, match="adapter_config"):
        await engine.load_lora("poet", str(wide_model_dir))
    await engine.load_lora("poet", path)
    with pytest.raises(ConflictError, match="poet"):
        await engine.load_lora("poet", path)
    adapted, plain = await asyncio.gather(
        collect(engine, "adapted", prompt, sampling, lora="poet"), collect(engine, "plain", prompt, sampling)
    )
    assert tokens_of(adapted) == expected.token_ids
    assert tokens_of(plain) != tokens_of(adapted)
    await engine.unload_lora("poet")
    with pytest.raises(NotFoundError, match="poet"):
        await engine.unload_lora("poet")


@needs_vllm
async def test_other_weights_take_over_between_two_tokens_and_bad_ones_change_nothing(
    vllm_cores: SharedCores, wide_model_dir: Path, model_dir: Path, tmp_path: Path
) -> None:
    other, broken = tmp_path / "other", tmp_path / "broken"
    shutil.copytree(wide_model_dir, other)
    model = LlamaForCausalLM.from_pretrained(wide_model_dir)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    model.save_pretrained(other)
    shutil.copytree(other, broken)
    os.truncate(broken / "model.safetensors", 50_000)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    long = replace(sampling, max_tokens=MAX_LEN - len(PROMPT))
    before, after = (LLM(each, max_model_len=MAX_LEN) for each in (wide_model_dir, other))
    [old], [new] = before.generate([PROMPT], long), after.generate([PROMPT], sampling)
    assert old.token_ids[:12] != new.token_ids
    engine = vllm_cores.engine()
    info = await engine.start()
    running = engine.generate(GenRequest(request_id="running", prompt=PROMPT, sampling=long))
    try:
        chunks = [await anext(running)]
        for source, error in ((model_dir, ConflictError), (broken, DataError)):
            with pytest.raises(error):
                await engine.load_weights(str(source))
        assert (await engine.stats()).weights_version == info.weights_version
        version = await engine.load_weights(str(other))
        assert version == (await engine.stats()).weights_version != info.weights_version
        fresh = await collect(engine, "fresh", PROMPT, sampling)
        assert tokens_of(fresh) == new.token_ids, "nor does it read the KV of the weights before"
        tokens = tokens_of(chunks + [chunk async for chunk in running])
    finally:
        await engine.load_weights(str(wide_model_dir))
    assert len(tokens) == long.max_tokens
    at = next(i for i, (one, seen) in enumerate(zip(old.token_ids, tokens, strict=True)) if one != seen)
    [rest] = after.generate([PROMPT + tokens[:at]], replace(long, max_tokens=8))
    assert tokens[at : at + 8] == rest.token_ids, "it goes on with the new ones"
    assert tokens_of(await collect(engine, "again", PROMPT, sampling)) == old.token_ids[:12]


@needs_vllm
async def test_an_unknown_device_and_argument_are_refused(wide_model_dir: Path) -> None:
    for options, word in (({"device": "tpu"}, "tpu"), ({"vllm": {"speed": 9}}, "speed")):
        config = VllmConfig.parse({"model_dir": str(wide_model_dir), **options}, where="test")
        with pytest.raises(ConfigError, match=word):
            await VllmEngine(config).start()


@pytest.mark.parametrize("option", [{"deterministic": True}, {"host_memory_gb": 1.0}, {"policy": "deadline"}])
async def test_options_that_vllm_lacks_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        VllmConfig.parse({"model_dir": "m", **option}, where="test")


ARGUMENTS = {
    *("model", "dtype", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "scheduling_policy", "seed"),
    *("kv_cache_memory_bytes", "disable_log_stats", "enforce_eager", "enable_chunked_prefill", "generation_config"),
}


async def test_a_vllm_without_a_needed_argument_is_refused_and_without_another_is_not() -> None:
    config = VllmConfig(model_dir="m")
    assert "generation_config" in engine_arguments(config, ARGUMENTS, is_cpu=True)
    assert "generation_config" not in engine_arguments(config, ARGUMENTS - {"generation_config"}, is_cpu=True)
    with pytest.raises(ConfigError, match="scheduling_policy"):
        engine_arguments(config, ARGUMENTS - {"scheduling_policy"}, is_cpu=True)


async def test_without_vllm_the_hint_says_how_to_install_it(
    wide_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed.*\./dev setup --vllm.*raytide\[vllm\]"):
        await VllmEngine(VllmConfig(model_dir=str(wide_model_dir))).start()


async def test_a_companion_that_breaks_vllm_is_named(wide_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setattr(launch, "import_module", broken)
    monkeypatch.setattr(launch, "broken_torch_packages", lambda: ["torchvision"])
    with pytest.raises(ConfigError, match=r"torchvision.*pip uninstall -y torchvision"):
        await VllmEngine(VllmConfig(model_dir=str(wide_model_dir))).start()


async def test_its_process_ends_with_one_that_is_killed() -> None:
    """Without vLLM: a process whose child has imported what is mixed into vLLM's worker."""
    code = """
import multiprocessing, time

def child():
    import raytide.actors.engine.backends.vllm.worker_extension
    print(multiprocessing.current_process().pid, flush=True)
    time.sleep(600)

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    assert psutil.wait_procs([child], timeout=120)[1] == []
