"""Measures the hit rate of the prefix cache on a recorded day, and the time to the first token without and with a hit.

    python benchmarks/engine/prefix_cache.py TRACE.jsonl [--requests 4000]

TRACE is in Mooncake's format: timestamp (ms), input_length, output_length and hash_ids. There is one id for each 512
tokens of a prompt, and equal ids mean equal prefixes. All lengths are divided by 32, so that an id becomes a block
of 16 tokens. The production scheduler and block pool replay the trace on a virtual clock, with one step every 250 ms
and without a model. The hit rate is compared with that of an unlimited cache, which keeps every block of all earlier
prompts.

Then a small native model answers prompts of 1,024 random tokens, first without and then with cached prompts. Prints
the median and the spread of the time to the first token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))

from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.sequence import Sequence

TRACE_BLOCK, BLOCK = 512, 16
SCALE = TRACE_BLOCK // BLOCK
STEP_S = 0.25
VOCAB = 4096


@dataclass(frozen=True, slots=True)
class Recorded:
    arrival_s: float
    prompt: list[int]
    output_len: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=15, help="of the native model")
    options = parser.parse_args()
    requests = list(read(options.trace, options.requests))
    best, distinct = endless(requests)
    print(f"{len(requests)} requests, {distinct} distinct blocks; a cache without end finds {best:.2%} of the tokens")
    print(f"{'device':>8}{'host':>8}{'hit rate':>10}{'of endless':>12}{'evicted':>9}")
    for device, host in ((1.0, 0.0), (0.5, 0.0), (0.25, 0.0), (0.1, 0.0), (0.1, 0.25), (0.1, 1.0)):
        # Running requests need room beside what is cached.
        hit, evicted = replay(requests, int(distinct * device) + 2000, int(distinct * host))
        print(f"{device:>8.0%}{host:>8.0%}{hit:>10.2%}{hit / best:>12.1%}{evicted:>9}")
    step_cost()
    first_token(options.prompts)


def read(trace: Path, most: int) -> Iterator[Recorded]:
    with trace.open() as lines:
        for line, _ in zip(lines, range(most), strict=False):
            row = json.loads(line)
            tokens = [token for each in row["hash_ids"] for token in range(each * BLOCK, (each + 1) * BLOCK)]
            length = max(1, row["input_length"] // SCALE)
            yield Recorded(row["timestamp"] / 1e3, tokens[:length], max(1, row["output_length"] // SCALE))


def endless(requests: list[Recorded]) -> tuple[float, int]:
    """Returns the share of all prompt tokens that an unlimited cache would find, and the number of distinct blocks."""
    known: set[tuple[int, ...]] = set()
    hits = 0
    for request in requests:
        # A trace's id stands for its whole prefix, so a block's own tokens do too.
        blocks = [tuple(request.prompt[at : at + BLOCK]) for at in range(0, len(request.prompt), BLOCK)]
        for block in blocks[: (len(request.prompt) - 1) // BLOCK]:
            if block not in known:
                break
            hits += BLOCK
        known.update(block for block in blocks if len(block) == BLOCK)
    return hits / sum(len(request.prompt) for request in requests), len(known)


def replay(requests: list[Recorded], num_blocks: int, num_host_blocks: int) -> tuple[float, int]:
    """Returns the hit rate, and the number of evictions of running sequences."""
    pool = BlockPool(num_blocks, BLOCK, num_host_blocks)
    scheduler = Scheduler(pool, max_running=64, max_batch_tokens=2048, swap_cost=SwapCost(1.0))
    now_s, at = 0.0, 0
    seqs = [sequence(f"{index}", each.prompt, each.output_len, each.arrival_s) for index, each in enumerate(requests)]
    while at < len(seqs) or scheduler.has_work:
        if not scheduler.has_work:
            now_s = max(now_s, seqs[at].arrival_s)
        while at < len(seqs) and seqs[at].arrival_s <= now_s:
            scheduler.add(seqs[at])
            at += 1
        plan = scheduler.plan(now_s)
        scheduler.commit(plan, {chunk.seq.seq_id: -1 for chunk in plan.chunks if chunk.yields_token})
        now_s += STEP_S
    return sum(seq.num_cached for seq in seqs) / sum(seq.prompt_len for seq in seqs), scheduler.preemptions


def sequence(name: str, prompt: list[int], output_len: int, arrival_s: float = 0.0) -> Sequence:
    return Sequence(
        seq_id=name,
        tokens=list(prompt),
        prompt_len=len(prompt),
        params=SamplingParams(),
        max_len=len(prompt) + output_len,
        stop_token_ids=frozenset(),
        seed=0,
        arrival_s=arrival_s,
    )


def step_cost() -> None:
    """Prints the time that the scheduler itself takes in a step in which 64 sequences decode."""
    scheduler = Scheduler(BlockPool(64 * 128 + 64, BLOCK), max_running=64, max_batch_tokens=2048)
    for at in range(64):
        scheduler.add(sequence(f"{at}", [at] * 1024, 900))
    plan_s, commit_s = list[float](), list[float]()
    while len(plan_s) < 500:
        began = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        sampled = {chunk.seq.seq_id: 1 for chunk in plan.chunks if chunk.yields_token}
        ready = time.perf_counter()
        scheduler.commit(plan, sampled)
        if plan.num_tokens == len(plan.chunks) == 64:
            plan_s.append(planned - began)
            commit_s.append(time.perf_counter() - ready)
    for name, times in (("plan", plan_s), ("commit", commit_s)):
        microseconds = sorted(each * 1e6 for each in times)
        print(f"{name:>6} with 64 decodes: {microseconds[250]:.0f} us, 99th percentile {microseconds[495]:.0f} us")


def first_token(count: int) -> None:
    from raytide.actors.engine import LLM

    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        llm = LLM(folder, max_model_len=2048, block_size=BLOCK)
        rng = random.Random(0)
        prompts = [[rng.randrange(1, VOCAB) for _ in range(1024)] for _ in range(count + 1)]

        def seconds(prompt: list[int]) -> float:
            began = time.perf_counter()
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            return time.perf_counter() - began

        seconds(prompts.pop())  # warms up
        cold = [seconds(prompt) for prompt in prompts]
        warm = [seconds(prompt) for prompt in prompts]
    for name, times in (("cold", cold), ("full hit", warm)):
        spread = f"{min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}"
        print(f"first token, {name:>8}: {statistics.median(times) * 1e3:7.1f} ms ({spread})")
    print(f"a full hit is {statistics.median(cold) / statistics.median(warm):.1f} times as fast")


def save_model(model_dir: Path) -> None:
    """Writes a Llama model of 5M parameters with random weights, and a tokenizer that is never used."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(shape).save_pretrained(model_dir)
    Tokenizer(models.BPE()).save(str(model_dir / "tokenizer.json"))


if __name__ == "__main__":
    main()
