"""Compares one process that has several threads with several single-threaded processes that share the model. The number
of processes is equal to the number of threads.

The two variants take turns. Prompts are random tokens, and answers are greedy and of a fixed length. Prints the
tokens/s of both variants (median, least and most of all turns), their ratio, and the memory that each process does
not share with others.

    python benchmarks/engine/tensor_parallel.py --shape 28M --size 2 --turns 5
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))
sys.path.insert(0, str(Path(__file__).parent))

from engine_cpu import SHAPES, save_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="28M")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    import psutil
    import torch

    from raytide.actors.engine import LLM, SamplingParams

    torch.set_num_threads(options.size)
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), SHAPES[options.shape], options.dtype)
        alone = LLM(folder, dtype=options.dtype)
        group = LLM(folder, dtype=options.dtype, tensor_parallel=options.size)
        sampling = SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True)

        def tokens_per_s(llm: LLM, threads: int, count: int) -> float:
            torch.set_num_threads(threads)
            prompts = [[random.randrange(1, 1000) for _ in range(128)] for _ in range(count)]
            began = time.perf_counter()
            llm.generate(prompts, sampling)
            return count * options.new_tokens / (time.perf_counter() - began)

        print(
            f"{options.shape}, {options.dtype}, seed {options.seed}, {options.turns} turns, load {psutil.getloadavg()}"
        )
        for count in options.concurrency:
            ways = {"one process": (alone, options.size), f"{options.size} processes": (group, 1)}
            seen: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(options.turns + 1):  # the first warms up
                for name, (llm, threads) in ways.items():
                    rate = tokens_per_s(llm, threads, count)
                    if turn:
                        seen[name].append(rate)
            for name, rates in seen.items():
                print(f"c{count} {name}: {statistics.median(rates):.0f} tok/s ({min(rates):.0f} to {max(rates):.0f})")
            one, several = seen.values()
            ratios = [theirs / own for own, theirs in zip(one, several, strict=True)]
            print(f"c{count} ratio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        for process in psutil.Process().children():
            print(f"member {process.pid}: {process.memory_full_info().uss / 1e6:.0f} MB")
        group.close()


if __name__ == "__main__":
    main()
