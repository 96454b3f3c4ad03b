"""Measures the time that sampling options add to a step of many rows over a large vocabulary.

    python benchmarks/engine/sampling_options.py [--rows 128] [--vocab 100000] [--rounds 9]

Each option is measured with a sampler of its own, and all rows of this sampler use the option. The samplers take
turns in one process on one thread, and choose tokens for the same random logits. Prints the median and the spread of
the CPU time that each sampler takes. The baseline has the same number of rows, with a temperature of 1 and no other
option. The random seed is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))

from raytide.actors.engine.sampling.sampler import Sampler
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.sequence import Sequence

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_p, top_k, min_p": {"top_p": 0.95, "top_k": 50_000, "min_p": 1e-4},
    "logprobs 20": {"logprobs": 20},
    "logprobs 20, logit_bias": {"logprobs": 20, "logit_bias": {5: 1.0}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for scale in (1.0, 3.0):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(options.rows, options.vocab, generator=generator) * scale
        print(f"logits with a standard deviation of {scale:g}")
        report(measure(logits, options.rounds))


def measure(logits_RV: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Returns a dict from each option to the milliseconds that each of its rounds took. A warm-up round runs first and
    is not included.
    """
    samplers = {name: (Sampler(), sequences(len(logits_RV), fields)) for name, fields in OPTIONS.items()}
    times: dict[str, list[float]] = {name: [] for name in OPTIONS}
    scratch_RV = torch.empty_like(logits_RV)
    for turn in range(rounds + 1):
        for name, (sampler, seqs) in samplers.items():
            scratch_RV.copy_(logits_RV)
            began_s = time.thread_time()
            sampler.sample(scratch_RV, seqs)
            if turn:
                times[name].append((time.thread_time() - began_s) * 1e3)
    return times


def sequences(rows: int, fields: dict[str, Any]) -> list[Sequence]:
    params = SamplingParams(temperature=1.0, max_tokens=None, **fields)
    return [Sequence(f"s{row}", [5, 6], 1, params, 1000, frozenset(), row) for row in range(rows)]


def report(times: dict[str, list[float]]) -> None:
    plain = statistics.median(times["plain"])
    for name, found in times.items():
        median = statistics.median(found)
        print(f"  {name:<26}{median:7.1f} ms ({min(found):.1f} to {max(found):.1f}), {median - plain:+.1f} to plain")


if __name__ == "__main__":
    main()
