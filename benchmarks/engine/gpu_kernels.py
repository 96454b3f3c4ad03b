"""Compares the GPU kernels with torch's operators, in one run on one GPU.

    python benchmarks/engine/gpu_kernels.py [--json FILE]

Prints one line for each case of an operator:

- The median, the shortest and the longest time of 20 runs.
- The share of the memory's bandwidth that the operator reaches.
- The median time of torch's operator for the same task.

The share is computed from the smallest number of bytes that the operator must read and write. The bandwidth is that
of a copy of 1 GiB in the same run. The weights have the sizes of one layer of an 8B model. Before each run, 256 MiB
are written, because the caches would otherwise hold the operands.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from raytide.kernels import ref
from raytide.kernels.core import AttentionSpec, NormWeights, PagedBatch, QuantizedWeight
from raytide.kernels.device import resolve_device
from raytide.kernels.registry import Ops, ops_for

HEADS, KV_HEADS, DIM, HIDDEN, BLOCK = 32, 8, 128, 4096, 16
RUNS = 20
DTYPE = torch.bfloat16

Case = tuple[str, int, Callable[[], object], Callable[[], object]]
"""A name, the least bytes that move, raytide's operator and torch's."""


def times_ms(work: Callable[[], object]) -> list[float]:
    """Returns the times of RUNS runs, sorted. Before each run, the caches are overwritten."""
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    work()
    times = []
    for _ in range(RUNS):
        flush.zero_()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return sorted(times)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda")


def attention_cases(ops: Ops) -> Iterator[Case]:
    for sequences, new, context in ((1, 1, 8192), (16, 1, 2048), (128, 1, 1024), (1, 2048, 2048)):
        width = context // BLOCK
        tables = torch.randperm(sequences * width, device="cuda").view(sequences, width)
        slots = torch.zeros(sequences * new, dtype=torch.int64, device="cuda")
        batch = PagedBatch([new] * sequences, [context] * sequences, tables, slots, BLOCK)
        cache, q = random(2, sequences * context, KV_HEADS, DIM), random(sequences * new, HEADS, DIM)
        attend = ops.attention(batch, AttentionSpec(DIM**-0.5))
        k, v = random(2, sequences, KV_HEADS, context, DIM)
        whole = q.view(sequences, new, HEADS, DIM).transpose(1, 2)

        def sdpa(whole: torch.Tensor = whole, k: torch.Tensor = k, v: torch.Tensor = v, new: int = new) -> object:
            return F.scaled_dot_product_attention(whole, k, v, is_causal=new > 1, enable_gqa=True)

        name = f"attention, {sequences} x {new} new of {context}"
        moved = 2 * (cache.numel() + 2 * q.numel())
        yield name, moved, lambda attend=attend, q=q, cache=cache: attend(q, cache), sdpa  # type: ignore[misc]


def linear_cases(ops: Ops) -> Iterator[Case]:
    plain = random(HIDDEN * 4, HIDDEN)
    for bits in (4, 8):
        codes = torch.randint(-8, 8, plain.shape, dtype=torch.int8, device="cuda")
        weight = QuantizedWeight(bits, codes, torch.full((HIDDEN * 4, HIDDEN // 128), 0.0078125, device="cuda"))  # type: ignore[arg-type]
        apply = ops.quantized_linear(weight, None, "float")
        for rows in (1, 16, 64, 2048):
            x = random(rows, HIDDEN)
            moved = codes.numel() * bits // 8 + 2 * (x.numel() + rows * HIDDEN * 4)
            name = f"{bits}-bit linear, {rows} rows, beside bfloat16"
            yield name, moved, lambda apply=apply, x=x: apply(x), lambda x=x: F.linear(x, plain)  # type: ignore[misc]


def short_cases(ops: Ops) -> Iterator[Case]:
    for rows in (1, 64, 2048):
        x, delta, gate_up = random(rows, HIDDEN), random(rows, HIDDEN), random(rows, 7 * HIDDEN)
        by = NormWeights(random(HIDDEN), None, 1e-5)
        yield (
            f"add, norm, {rows} rows",
            2 * 4 * x.numel(),
            lambda x=x, delta=delta, by=by: ops.add_norm(x, delta, by),  # type: ignore[misc]
            lambda x=x, delta=delta, by=by: ref.add_norm(x, delta, by),  # type: ignore[misc]
        )
        yield (
            f"silu(gate) * up, {rows} rows",
            3 * gate_up.numel(),
            lambda gate_up=gate_up: ops.activate_mul(gate_up, "silu"),  # type: ignore[misc]
            lambda gate_up=gate_up: ref.activate_mul(gate_up, "silu"),  # type: ignore[misc]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the GPU kernels beside torch's operators.")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This machine has no GPU that torch sees; the kernels stay unmeasured.")
    torch.manual_seed(0)
    ops = ops_for(resolve_device().kind)
    memory = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    copy_ms = statistics.median(times_ms(memory.clone))
    speed = 2 * memory.numel() / copy_ms
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies at {speed / 1e6:,.0f} GB/s")
    rows = []
    for cases in (attention_cases, linear_cases, short_cases):
        for name, moved, ours, torchs in cases(ops):
            found, beside = times_ms(ours), times_ms(torchs)
            ms, torch_ms = statistics.median(found), statistics.median(beside)
            share = moved / ms / speed
            rows.append(
                {"what": name, "ms": ms, "least": found[0], "most": found[-1], "share": share, "torch": torch_ms}
            )
            spread = f"({found[0]:.3f} to {found[-1]:.3f})"
            print(f"{name:46} {ms:8.3f} ms {spread:18} {share:5.0%} of a copy   torch {torch_ms:8.3f} ms")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
