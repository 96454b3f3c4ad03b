"""Runs one engine in a process of its own, pinned to some cores. `engine_cpu.py` starts these processes.

    python engine_sides.py SIDE MODEL_DIR DTYPE CORES

Each line on stdin is a JSON list of prompts, which run together. The answer is one line on stdout. It contains the
elapsed time, the CPU time and the mean time to the first token. For the native engine, it also contains the share of
time in the engine's own Python code. The script runs under any interpreter in which the engine is installed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

NEW_TOKENS = 64
MAX_LEN = 512
MAX_RUNNING = 64

Prompts = list[list[int]]
Answer = dict[str, float]


def native(model_dir: str, dtype: str, **options: object) -> Callable[[Prompts], Answer]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))
    from raytide.actors.engine import EngineConfig, GenRequest, SamplingParams
    from raytide.actors.engine.backends.native.engine_core import EngineCore
    from raytide.actors.engine.types import GenChunk

    fields = {"model_dir": model_dir, "dtype": dtype, "prefix_cache": False, "max_model_len": MAX_LEN}
    loop = EngineCore(EngineConfig.parse({**fields, **options, "kv_memory_gb": 4.0}, where="engine"))
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    computing_s = [0.0]

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **options: object) -> Any:
            began = time.thread_time()
            result = function(*args, **options)
            computing_s[0] += time.thread_time() - began
            return result

        return call

    loop.runner._model.forward = watch(loop.runner._model.forward)
    loop.runner._sampler.sample = watch(loop.runner._sampler.sample)
    gc.collect()
    gc.freeze()  # as an engine's own process does, and vLLM's engine too

    def generate(prompts: Prompts) -> Answer:
        computing_s[0], firsts, counts = 0.0, {}, dict.fromkeys(map(str, range(len(prompts))), 0)
        decode_s = decode_python_s = 0.0
        began, began_cpu = time.perf_counter(), time.process_time()
        for name, prompt in zip(counts, prompts, strict=True):
            loop.add(GenRequest(request_id=name, prompt=prompt, sampling=sampling), prompt)
        while loop.has_work:
            step_began, computed_s = time.thread_time(), computing_s[0]
            for chunk in loop.step():
                assert isinstance(chunk, GenChunk), chunk
                firsts.setdefault(chunk.request_id, time.perf_counter() - began)
                counts[chunk.request_id] += len(chunk.token_ids)
            if len(firsts) == len(prompts):
                step_s = time.thread_time() - step_began
                decode_s += step_s
                decode_python_s += step_s - (computing_s[0] - computed_s)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        assert set(counts.values()) == {NEW_TOKENS}
        return {
            "seconds": seconds,
            "cpu": cpu_seconds,
            "ttft": sum(firsts.values()) / len(firsts),
            "python": decode_python_s / decode_s,
        }

    return generate


def vllm(model_dir: str, dtype: str) -> Callable[[Prompts], Answer]:
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=model_dir,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_RUNNING,
        disable_log_stats=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)

    def generate(prompts: Prompts) -> Answer:
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        began, began_cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        assert all(len(output.outputs[0].token_ids) == NEW_TOKENS for output in outputs)
        firsts = [output.metrics.first_token_latency for output in outputs if output.metrics is not None]
        return {"seconds": seconds, "cpu": cpu_seconds, "ttft": sum(firsts) / len(firsts) if firsts else 0.0}

    return generate


def transformers(model_dir: str, dtype: str) -> Callable[[Prompts], Answer]:
    """Returns a function that generates with transformers, as one static batch that is padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()

    class FirstToken(BaseStreamer):  # type: ignore[misc]
        """The time of the second `put`: the first has the prompts."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def generate(prompts: Prompts) -> Answer:
        longest, first = max(map(len, prompts)), FirstToken()
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        streamer = first if len(prompts) == 1 else None  # transformers streams single prompts only
        began, began_cpu = time.perf_counter(), time.process_time()
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=streamer,
        )
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        assert out.shape[1] == longest + NEW_TOKENS
        return {"seconds": seconds, "cpu": cpu_seconds, "ttft": first.times[1] - began if first.times else 0.0}

    return generate


def floor(model_dir: str, dtype: str) -> Callable[[Prompts], Answer]:
    """Measures the speed of the machine: the bytes read from memory per second, and the floating-point operations per
    second. Each figure is the best result of several measurements that use the machine in different ways. The prompts
    are ignored.
    """
    sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))
    import torch

    from raytide.kernels.registry import ops_for

    kind, wide = getattr(torch, dtype), 2048
    weight = torch.randn(wide, wide).to(kind)
    linear, many = ops_for("cpu").linear(weight, None), torch.randn(wide, wide).to(kind)
    products = [lambda: linear(many), lambda: torch.mm(many, weight)]
    big = torch.randn(64 << 20)  # 256 MB, no cache holds it
    streamed = ops_for("cpu").linear(big.view(-1, 4096).to(kind), None)
    one, streamed_bytes = torch.randn(1, 4096).to(kind), big.numel() * kind.itemsize
    reads = [(big.sum, big.numel() * 4), (lambda: streamed(one), streamed_bytes)]

    def measure(_: Prompts) -> Answer:
        return {
            "bytes_s": max(size / _least(call) for call, size in reads),
            "flops_s": 2 * wide**3 / min(map(_least, products)),
        }

    return measure


def _least(call: Callable[[], object], times: int = 8) -> float:
    clock = time.thread_time if os.environ["OMP_NUM_THREADS"] == "1" else time.perf_counter
    best = float("inf")
    for _ in range(times):
        began = clock()
        call()
        best = min(best, clock() - began)
    return best


quantized = partial(native, quantized_input="int8", quantized_head=True)
SIDES = {
    "native": native,
    "int8": quantized,
    "int8_kv": partial(quantized, kv_dtype="int8"),
    "int4": quantized,
    "int4_128": quantized,
    "vllm": vllm,
    "transformers": transformers,
    "floor": floor,
}


def main(side: str, model_dir: str, dtype: str, cores: str) -> None:
    os.sched_setaffinity(0, set(map(int, cores.split(","))))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engines print goes to stderr
    generate = SIDES[side](model_dir, dtype)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
