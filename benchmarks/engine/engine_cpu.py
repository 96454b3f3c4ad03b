"""Measures generation on CPU cores. Compares the native engine with vLLM, with transformers, and with the limit of the
machine.

Each side of the comparison is a process of its own. All processes are pinned to the same cores and take turns.
Prompts have 16 to 256 random tokens (seed 0). For each prompt, 64 new tokens are generated, greedily and without a
prefix cache. At concurrency 1, four requests run one after another. At concurrency 8 there are two batches, and at
concurrency 64 there is one batch. tokens/s is the number of new tokens divided by the whole time, prefill included.
The best of the repeats counts. transformers is many times slower, so it is measured only once.

The floor is the least time that the machine needs, at the rates measured in the same run. It has two parts: the time
to multiply the prompts' tokens with the weights, and the time of all decoding steps. The time of a decoding step is
the larger of two times: the time to read all weights and the context's KV from memory, and the time to multiply.
"own" is the share of a decoding step that the native engine spends outside of the model and the sampler.

The sides `int8` and `int4` are the native engine with a rounded model, int8 inputs and an int8 head. int8 weights
have one scale for each output. int4 weights have one scale for every 32 inputs of an output, in `int4_128` for every
128 inputs. `int8_kv` is `int8` with a KV cache of int8.

    python benchmarks/engine/engine_cpu.py --vllm-python .venv-vllm/bin/python
    python benchmarks/engine/engine_cpu.py --shape 28M --dtype bfloat16 --threads 1 --concurrency 64
    python benchmarks/engine/engine_cpu.py --dtype bfloat16 --sides native int8 int8_kv int4 int4_128
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

NEW_TOKENS = 64
QUANTIZED: dict[str, dict[str, object]] = {
    "int8": {"scheme": "w8a16"},
    "int8_kv": {"scheme": "w8a16"},
    "int4": {"scheme": "w4a16"},
    "int4_128": {"scheme": "w4a16", "group": 128},
}
CALLS = {1: 4, 8: 2}  # at this concurrency; else 1


@dataclass(frozen=True)
class Shape:
    """The architecture and the sizes of a model. Its weights are random."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_numbers(self) -> int:
        """The number of values in the KV of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "28M": Shape("llama", 512, 8, 8, 4, 64, 1408, 4096),
    "350M": Shape("qwen3", 1024, 20, 16, 8, 128, 3072, 32768),
}

Prompts = list[list[int]]
Answer = dict[str, float]


class Side:
    """A process that runs one engine (`engine_sides.py`)."""

    def __init__(self, name: str, python: str, model_dir: Path, dtype: str, cores: list[int]) -> None:
        env = os.environ | {
            "OMP_NUM_THREADS": str(len(cores)),
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        if name == "vllm":
            env |= vllm_environment(python, cores)
        script = str(Path(__file__).with_name("engine_sides.py"))
        command = [python, script, name, str(model_dir), dtype, ",".join(map(str, cores))]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self._answer()

    def generate(self, prompts: Prompts) -> Answer:
        assert self.process.stdin is not None
        print(json.dumps(prompts), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _answer(self) -> Answer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            sys.exit(f"{self.process.args} failed:\n" + self.log.read().decode()[-4000:])
        answer: Answer = json.loads(line)
        return answer


def vllm_environment(python: str, cores: list[int]) -> dict[str, str]:
    """Returns the environment variables that vLLM's documentation recommends for CPUs. vLLM runs in one process, which
    is faster for models of these sizes.
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    openmp = Path(python).parents[1] / "lib" / "libiomp5.so"
    return env | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: count the CPU time of a side, divided by its cores, where other work disturbs the machine",
    )
    parser.add_argument("--sides", choices=["native", *QUANTIZED, "vllm", "transformers"], nargs="+", default=None)
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that has vLLM")
    options = parser.parse_args()
    sides = options.sides or ["native", "vllm", "transformers"]
    if "vllm" in sides and options.vllm_python == sys.executable and importlib.util.find_spec("vllm") is None:
        sides.remove("vllm")
    available = sorted(os.sched_getaffinity(0))
    cells = f"{'tok/s spread    TTFT':>22}"
    print(f"{'':31}{'native':>27}{'vLLM':>22}{'transformers':>22}{'native /':>15}{'share of':>10}")
    print(f"{'shape  dtype    cores  conc.':31}{cells}  own{cells}{cells}{'vLLM':>8}{'hf':>7}{'floor':>10}")
    for name, dtype, threads in itertools.product(options.shape, options.dtype, options.threads):
        if threads > len(available):
            print(f"{name:7}{dtype:9}{threads:5}  skipped: {len(available)} core(s) here")
            continue
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            save_model(Path(folder) / "plain", SHAPES[name], dtype)
            cores = available[:threads]
            started = {}
            for side in [*sides, "floor"]:
                python = options.vllm_python if side == "vllm" else sys.executable
                started[side] = Side(side, python, rounded(Path(folder), side), dtype, cores)
                stack.callback(started[side].close)
            for concurrency in options.concurrency:
                clock = "seconds" if options.clock == "wall" else "cpu"
                row = measure(started, SHAPES[name], dtype, concurrency, options.repeats, clock, threads)
                print(f"{name:7}{dtype:9}{threads:5}{concurrency:7}   {row}", flush=True)


def measure(
    sides: dict[str, Side], shape: Shape, dtype: str, concurrency: int, repeats: int, clock: str, threads: int
) -> str:
    """Returns one line of the table, with the results of all sides for the same batches. The sides take turns."""
    rng, calls = random.Random(0), CALLS.get(concurrency, 1)
    batches = [
        [[rng.randrange(1, shape.vocab) for _ in range(rng.randint(16, 256))] for _ in range(concurrency)]
        for _ in range(calls)
    ]
    rates: dict[str, list[float]] = {name: [] for name in sides}
    ttfts: dict[str, list[float]] = {name: [] for name in sides}
    own, machine = [], []
    for turn in range(repeats + 1):
        for name, side in sides.items():
            if turn == 0:  # the first call warms up
                side.generate([prompt[:16] for prompt in batches[0]])
                continue
            if name == "transformers" and turn > 1:
                continue
            answers = [side.generate(batch) for batch in batches]
            if name == "floor":
                machine.append(answers[0])
                continue
            seconds = sum(answer[clock] for answer in answers) / (threads if clock == "cpu" else 1)
            rates[name].append(calls * concurrency * NEW_TOKENS / seconds)
            ttfts[name].append(statistics.mean(answer["ttft"] for answer in answers))
            own += [answer["python"] for answer in answers if "python" in answer]
    width = 2 if dtype == "bfloat16" else 4
    bytes_s, flops_s = (max(each[key] for each in machine) for key in ("bytes_s", "flops_s"))
    least_s = sum(floor_s(shape, width, batch, bytes_s, flops_s) for batch in batches)
    floor_rate = calls * concurrency * NEW_TOKENS / least_s
    cells = ""
    for name in ("native", "vllm", "transformers"):
        cells += cell(rates.get(name), ttfts.get(name))
        if name == "native":
            cells += f"{statistics.median(own):5.0%}" if own else f"{'-':>5}"
    best = {name: max(found) for name, found in rates.items() if found}
    for other in ("vllm", "transformers"):
        cells += f"{best['native'] / best[other]:7.2f}x" if {"native", other} <= best.keys() else f"{'-':>8}"
    share = f"{best['native'] / floor_rate:9.0%}" if "native" in best else f"{'-':>9}"
    for name in (each for each in QUANTIZED if {each, "native"} <= best.keys()):
        share += f"   {name} {cell(rates[name], ttfts[name]).strip()} {best[name] / best['native']:.2f}x native"
    return f"{cells}{share}   ({bytes_s / 1e9:.1f} GB/s, {flops_s / 1e9:.0f} GFLOP/s)"


def cell(rates: list[float] | None, ttfts: list[float] | None) -> str:
    if not rates or not ttfts:
        return f"{'not installed':>22}"
    ttft = f"{min(ttfts) * 1e3:6.0f}ms" if min(ttfts) else f"{'-':>8}"
    return f"{max(rates):7.0f}{1 - min(rates) / max(rates):6.0%} {ttft}"


def floor_s(shape: Shape, width: int, batch: Prompts, bytes_s: float, flops_s: float) -> float:
    prompt_tokens, weights = sum(map(len, batch)), shape.layer_weights + shape.head_weights
    flops = 2 * prompt_tokens * shape.layer_weights + 2 * len(batch) * shape.head_weights
    flops += sum(2 * len(prompt) ** 2 * shape.layers * shape.heads * shape.head_dim for prompt in batch)
    total = flops / flops_s
    for made in range(1, NEW_TOKENS):
        read_s = (weights + (prompt_tokens + made * len(batch)) * shape.kv_numbers) * width / bytes_s
        total += max(read_s, 2 * len(batch) * weights / flops_s)
    return total


def rounded(folder: Path, side: str) -> Path:
    """Returns the directory of the model that a side uses. Writes a rounded model first if the side needs one."""
    if side not in QUANTIZED:
        return folder / "plain"
    from raytide.pipelines.compress.chain import compress
    from raytide.pipelines.compress.recipe import CompressRecipe

    fields = {"model": str(folder / "plain"), "out": str(folder / side), "steps": [{"rtn": QUANTIZED[side]}]}
    compress(CompressRecipe.parse(fields, where="recipe"))
    return folder / side / "model"


def save_model(model_dir: Path, shape: Shape, dtype: str, max_positions: int = 1024) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    fields = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": True,
    }
    config, kind = (LlamaConfig, LlamaForCausalLM) if shape.architecture == "llama" else (Qwen3Config, Qwen3ForCausalLM)
    kind(config(**fields)).to(getattr(torch, dtype)).save_pretrained(model_dir)
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model_dir / "tokenizer.json"))


if __name__ == "__main__":
    main()
