"""A model that the trainer tuned and exported says the same in transformers, the native engine and vLLM."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.actors.engine.backends.test_vllm import collect, tokens_of
from tests.actors.engine.families import save_family
from tests.actors.engine.tiny import VOCAB
from tests.actors.engine.vllm_cores import MAX_LEN, SharedCores, needs_vllm
from tests.actors.trainer.conftest import write_dataset
from transformers import AutoModelForCausalLM

from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.engine.backends.vllm.config import VllmConfig
from raytide.actors.engine.backends.vllm.engine import VllmEngine
from raytide.actors.trainer.runners.local import train_local
from raytide.core.specs.model import FinetuneSpec, LoraSpec
from raytide.core.specs.train import OptimSpec, TrainSpec

NEW_TOKENS = 16
PROMPTS = [[(7 * row + 3 * at) % (VOCAB - 1) + 1 for at in range(5 + 6 * row)] for row in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
LORA = FinetuneSpec(lora=LoraSpec(rank=4, alpha=8.0))

Tune = Callable[[Path, FinetuneSpec | None], Path]


@pytest.fixture
def tune(tmp_path: Path) -> Tune:
    """Trains a directory on, and gives that of the run."""

    def train(model_dir: Path, finetune: FinetuneSpec | None) -> Path:
        data = tmp_path / "tokens"
        if not data.exists():
            write_dataset(data)
        shutil.copyfile(model_dir / "tokenizer.json", data / "tokenizer.json")
        spec = TrainSpec(
            dataset=str(data),
            init_from=str(model_dir),
            out=str(tmp_path / f"{model_dir.name}-{'full' if finetune is None else 'lora'}"),
            finetune=finetune,
            optim=OptimSpec(lr=5e-3, warmup_steps=1),
            steps=5,
            global_batch=4,
            micro_batch=4,
            seq_len=32,
        )
        train_local(spec)
        return Path(spec.out)

    return train


def by_transformers(model_dir: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    answers = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            row = list(prompt)
            for _ in range(NEW_TOKENS):
                row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
            answers.append(row[len(prompt) :])
    return answers


def natively(model_dir: Path) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in LLM(model_dir, max_model_len=MAX_LEN).generate(PROMPTS, GREEDY)]


async def by_vllm(engine: VllmEngine, lora: str | None = None) -> list[list[int]]:
    named = {} if lora is None else {"lora": lora}
    return [
        tokens_of(await collect(engine, f"r{i}-{lora}", prompt, GREEDY, **named)) for i, prompt in enumerate(PROMPTS)
    ]


@needs_vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_a_tuned_llama_says_the_same_everywhere(
    vllm_cores: SharedCores, wide_model_dir: Path, tune: Tune
) -> None:
    """All of it tuned, adapters merged, and the adapter on the model as it was."""
    untuned = natively(wide_model_dir)
    engine = vllm_cores.engine()
    await engine.start()
    for finetune in (None, LORA):
        run = tune(wide_model_dir, finetune)
        expected = by_transformers(run / "model")
        assert expected != untuned
        assert natively(run / "model") == expected
        async with vllm_cores.other_weights(run / "model"):
            assert await by_vllm(engine) == expected
        if finetune is not None:
            await engine.load_lora("tuned", str(run / "adapter"))
            assert await by_vllm(engine, "tuned") == expected
            await engine.unload_lora("tuned")
    assert await by_vllm(engine) == untuned


@needs_vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_a_tuned_qwen3_says_the_same_everywhere(tune: Tune, tmp_path: Path) -> None:
    """vLLM starts on its directory as it is."""
    source = tmp_path / "qwen3"
    save_family(source, "qwen3-tied", hidden_size=128, head_dim=32)
    run = tune(source, LORA)
    expected = by_transformers(run / "model")
    assert expected != natively(source)
    assert natively(run / "model") == expected
    engine = VllmEngine(
        VllmConfig(
            model_dir=str(run / "model"),
            max_model_len=MAX_LEN,
            block_size=32,
            kv_memory_gb=0.05,
            max_running=4,
            max_batch_tokens=MAX_LEN,
        )
    )
    await engine.start()
    try:
        assert await by_vllm(engine) == expected
    finally:
        await engine.shutdown()
