"""Measures the time from `import` to the first token in fresh processes, by phase. The model is a Llama with 28M random
weights.

    python benchmarks/engine/cold_start.py [--runs 5] [--cores 0,1] [--dtype bfloat16]

Prints the median, the least and the greatest time of each phase in milliseconds. The column "first ever" is a run
with an empty kernel cache. This run has to build the C operators. The other runs find the operators in the cache.
For comparison, transformers is measured in the same run: import, from_pretrained, one token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from engine_cpu import SHAPES, save_model

PROMPT = list(range(5, 37))

NATIVE = """
import json, sys, time
began = last = time.perf_counter()
phases = {}
def lap(name):
    global last
    now = time.perf_counter()
    phases[name] = phases.get(name, 0.0) + (now - last) * 1e3
    last = now
import torch
lap("import torch")
from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.engine.kv_cache.kv_cache import KvCache
from raytide.actors.engine.model.model_runner import Runner
from raytide.kernels import registry
lap("import raytide's engine")
def timed(owner, name, before, after):
    call = getattr(owner, name)
    def wrapped(*args, **options):
        lap(before)
        result = call(*args, **options)
        lap(after)
        return result
    setattr(owner, name, wrapped)
import raytide.actors.engine.model.model_runner as runner
timed(runner, "ops_for", "config, tokenizer, version", "choose operators")
timed(Runner, "load", "choose operators", "weights")
timed(KvCache, "allocate", "weights", "KV memory")
llm = LLM(sys.argv[1], dtype=sys.argv[2], kv_memory_gb=0.25)
lap("scheduler and the rest")
llm.generate([json.loads(sys.argv[3])], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
lap("first token")
phases["total"] = (last - began) * 1e3
llm.generate([json.loads(sys.argv[3])[::-1]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
lap("(a second prompt)")
print(json.dumps(phases))
"""

TRANSFORMERS = """
import json, sys, time
began = time.perf_counter()
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
ids = torch.tensor([json.loads(sys.argv[3])])
model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
print(json.dumps({"total": (time.perf_counter() - began) * 1e3}))
"""


def run(script: str, model_dir: Path, dtype: str, cores: set[int], cache: str) -> dict[str, float]:
    environment = os.environ | {
        "OMP_NUM_THREADS": str(len(cores)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAYTIDE_KERNEL_CACHE": cache,
        "PYTHONPATH": str(Path(__file__).parents[2] / "platform"),
    }
    command = [sys.executable, "-W", "ignore", "-c", script, str(model_dir), dtype, json.dumps(PROMPT)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    )
    phases: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    cores = {int(core) for core in options.cores.split(",")}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        model_dir = Path(folder)
        save_model(model_dir, SHAPES["28M"], options.dtype)
        first = run(NATIVE, model_dir, options.dtype, cores, cache)
        rounds = [
            (
                run(NATIVE, model_dir, options.dtype, cores, cache),
                run(TRANSFORMERS, model_dir, options.dtype, cores, cache),
            )
            for _ in range(options.runs)
        ]
    print(f"28M, {options.dtype}, {len(cores)} cores, {options.runs} runs, seed 0; milliseconds")
    print(f"{'':<28}{'median':>9}{'least':>9}{'most':>9}{'first ever':>12}")
    for phase in first:
        times = [native[phase] for native, _ in rounds]
        print(f"{phase:<28}{statistics.median(times):>9.0f}{min(times):>9.0f}{max(times):>9.0f}{first[phase]:>12.0f}")
    times = [other["total"] for _, other in rounds]
    print(f"{'transformers, total':<28}{statistics.median(times):>9.0f}{min(times):>9.0f}{max(times):>9.0f}")


if __name__ == "__main__":
    main()
