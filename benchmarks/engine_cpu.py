"""Tokens per second of the native engine and of transformers' static batches, side by side in one run, on this CPU.

    python benchmarks/engine_cpu.py --threads 1 --concurrency 1 8 32

A Llama shape with random weights; prompts of 16 to 256 tokens from seed 0; each answer has 64 greedy tokens. tokens/s
counts output tokens over the wall time of the whole call, prefill included. The sides alternate; the best of the
repeats counts and the spread is printed. "overhead" is the share of the offline engine's time
outside the model's forward pass and the sampler.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "platform"))

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from raytide.actors.engine import LLM

VOCAB = 4096
NEW_TOKENS = 64
SHAPES = {
    "5M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6},
    "28M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8},
}

Prompts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="5M")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is loaded
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), options)


def compare(model_dir: Path, options: argparse.Namespace) -> None:
    from raytide.actors.engine import LLM

    model = save_model(model_dir, options.shape, options.dtype)
    llm = LLM(model_dir, dtype=options.dtype, prefix_cache=False)
    inside_s = watch(llm)
    sides: dict[str, Callable[[Prompts], float]] = {
        "native": lambda prompts: timed(lambda: native(llm, prompts)),
        "async": lambda prompts: asyncio.run(native_async(model_dir, options.dtype, prompts)),
        "transformers": lambda prompts: timed(lambda: static_batch(model, prompts)),
    }
    rng = random.Random(0)
    everyone = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(16, 256))] for _ in range(max(options.concurrency))]
    print(f"{options.shape} {options.dtype}, {options.threads} thread(s), {NEW_TOKENS} new tokens; tokens/s (spread)")
    print(f"{'concurrency':>11}" + "".join(f"{name:>20}" for name in sides) + f"{'native / hf':>13}{'overhead':>10}")
    for concurrency in options.concurrency:
        rates: dict[str, list[float]] = {name: [] for name in sides}
        overheads = []
        for _ in range(options.repeats):
            for name, side in sides.items():
                inside_s[0] = 0.0
                seconds = side(everyone[:concurrency])
                rates[name].append(concurrency * NEW_TOKENS / seconds)
                if name == "native":
                    overheads.append(1 - inside_s[0] / seconds)
        cells = "".join(f"{max(r):>12.0f} ({1 - min(r) / max(r):>4.0%})" for r in rates.values())
        ratio = max(rates["native"]) / max(rates["transformers"])
        print(f"{concurrency:>11}{cells}{ratio:>13.2f}{min(overheads):>10.1%}", flush=True)


def save_model(model_dir: Path, shape: str, dtype: str) -> LlamaForCausalLM:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **SHAPES[shape],
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.save_pretrained(model_dir)
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    return model


def watch(llm: LLM) -> list[float]:
    """Add up the seconds that the runner spends in the forward pass and the sampler."""
    inside_s = [0.0]
    runner = llm._loop._runner

    def measured(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            began = time.perf_counter()
            result = function(*args)
            inside_s[0] += time.perf_counter() - began
            return result

        return call

    runner._model.forward = measured(runner._model.forward)  # type: ignore[method-assign]
    runner._sampler.sample = measured(runner._sampler.sample)  # type: ignore[method-assign]
    return inside_s


def timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def native(llm: LLM, prompts: Prompts) -> None:
    from raytide.actors.engine import SamplingParams

    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    assert all(len(answer.outputs[0].token_ids) == NEW_TOKENS for answer in answers)


async def native_async(model_dir: Path, dtype: str, prompts: Prompts) -> float:
    """The same through the async engine, each request its own task that reads its stream."""
    from raytide.actors.engine import EngineConfig, GenRequest, NativeEngine, SamplingParams

    engine = NativeEngine(EngineConfig.parse({"model_dir": str(model_dir), "dtype": dtype}, where="engine"))
    await engine.start()
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    async def ask(name: str, prompt: list[int]) -> int:
        request = GenRequest(request_id=name, prompt=prompt, sampling=sampling)
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    began = time.perf_counter()
    counts = await asyncio.gather(*(ask(str(index), prompt) for index, prompt in enumerate(prompts)))
    seconds = time.perf_counter() - began
    assert set(counts) == {NEW_TOKENS}
    await engine.shutdown()
    return seconds


def static_batch(model: LlamaForCausalLM, prompts: Prompts) -> None:
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert out.shape[1] == longest + NEW_TOKENS


if __name__ == "__main__":
    main()
