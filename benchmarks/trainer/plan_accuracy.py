"""Compares the planner's predicted step times with measured step times on this machine's CPUs.

    python benchmarks/trainer/plan_accuracy.py [--steps 7] [--ranks 2] [--seconds 2] [--json FILE]

The benchmark first measures the machine, as `raytide bench node` does: matrix products, memory, and an all-reduce
between ranks on gloo. Then real trainers run. Twelve configurations run in one process, and the median step time of
each is compared with the prediction. The pace of the device is learned from three of these configurations, and the
printed errors are those of the other nine. Several layouts then run on `--ranks` ranks, and the planner's first
choice is compared with the fastest layout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_cpu import write_dataset

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.trainer import Trainer
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import MemorySpec, TrainSpec
from raytide.sdk.bench.node.measure import compute_figures
from raytide.sdk.plan import plan_workload
from raytide.sizing.calibration import MeasuredRun, learn
from raytide.sizing.devices import Accelerator, cpu_device, with_figures
from raytide.sizing.step_time import step_time
from raytide.sizing.workload import Strategy

TIMEOUT_S = 600.0
CALIBRATION = 4
"""Each so many-th configuration is learned from."""
MODELS = {"small": (192, 4, 6), "deep": (256, 8, 8), "wide": (512, 4, 8)}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    (model, {"seq_len": seq_len, "global_batch": batch, "micro_batch": batch, "memory": memory})
    for model in MODELS
    for seq_len, batch, memory in (
        (128, 8, {}),
        (256, 8, {"checkpointing": "full"}),
        (256, 4, {"loss_chunk": 256}),
        (512, 4, {"checkpointing": "selective"}),
    )
]
LAYOUTS: list[dict[str, Any]] = [
    {"layout": layout, "micro_batch": micro}
    for micro in (4, 8)
    for layout in ({"zero": 3}, {"zero": 2}, {"replicate": 2, "shard": 1}, {"tensor": 2})
]


@dataclass(frozen=True)
class Row:
    name: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = root / "data"
        write_dataset(data, tokens=1 << 20)
        specs = [spec_of(data, root / f"run-{at}", *config) for at, config in enumerate(CONFIGS)]
        alone = together(1, root / "alone", specs, options.steps, options.seconds)[0]
        wide = [spec_of(data, root / f"wide-{at}", "deep", {**WIDE, **each}) for at, each in enumerate(LAYOUTS)]
        ranks = together(options.ranks, root / "ranks", wide, options.steps, options.seconds)
    device = with_figures(cpu_device(1), alone.figures)
    runs = [measured_run(spec, seconds, device, 1) for spec, seconds in zip(specs, alone.steps, strict=True)]
    learned = learn(runs[::CALIBRATION]).apply(device)
    rows = [row(f"{name} {changes}", run, learned) for (name, changes), run in zip(CONFIGS, runs, strict=True)]
    held_out = [each for at, each in enumerate(rows) if at % CALIBRATION]
    shared = with_figures(replace(learned, is_cpu=True), ranks[0].figures)
    slowest = [max(each) for each in zip(*(found.steps for found in ranks), strict=True)]
    many = [measured_run(spec, seconds, shared, options.ranks) for spec, seconds in zip(wide, slowest, strict=True)]
    layouts = [row(str(each), run, shared) for each, run in zip(LAYOUTS, many, strict=True)]
    report(rows, held_out, layouts, options.json)


WIDE: dict[str, Any] = {"seq_len": 256, "global_batch": 16}


@dataclass(frozen=True)
class Found:
    figures: dict[str, float]
    steps: list[float]


def spec_of(data: Path, out: Path, model: str, changes: dict[str, Any]) -> TrainSpec:
    dim, layers, heads = MODELS[model]
    fields: dict[str, Any] = {
        "dataset": str(data),
        "out": str(out),
        "steps": 1000,
        "model": ModelSpec(vocab_size=4096, dim=dim, layers=layers, heads=heads, max_seq_len=1024),
        "snapshot_every": 0,
        "replica_check_every": 0,
        "export": False,
    }
    changes = {**changes}
    changes["memory"] = MemorySpec(**changes.get("memory", {}))
    changes["layout"] = Parallelism(**changes.get("layout", {}))
    return TrainSpec(**{**fields, **changes})


def together(world: int, meet: Path, specs: Sequence[TrainSpec], steps: int, seconds: float) -> list[Found]:
    """Runs `world` ranks, each in a process with one thread, and returns what each rank measured."""
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_rank, args=(there, rank, world, str(meet), list(specs), steps, seconds))
        child.start()
        pipes.append(here)
        children.append(child)
    try:
        return [_received(pipe) for pipe in pipes]
    finally:
        for child in children:
            child.join(5.0)
            child.kill()
            child.join()


def _received(pipe: Connection) -> Found:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"a rank measured nothing within {TIMEOUT_S:g} s")
    found: Found = pipe.recv()
    return found


def _rank(
    pipe: Connection, rank: int, world: int, meet: str, specs: list[TrainSpec], steps: int, seconds: float
) -> None:
    torch.set_num_threads(1)
    figures = compute_figures(seconds)
    times = []
    for at, spec in enumerate(specs):
        sizes = spec.layout.sizes(world)
        group = process_group.join(dist.FileStore(f"{meet}-{at}", world), rank, sizes, timeout_s=60.0)
        if world > 1 and "all_reduce_bytes_per_s" not in figures:
            figures["all_reduce_bytes_per_s"] = _all_reduce(world)
        trainer = Trainer(spec, group)
        times.append(statistics.median([_timed(trainer.step) for _ in range(steps + 2)][2:]))
        trainer.close()
        process_group.leave()
    pipe.send(Found(figures, times))


def _all_reduce(world: int) -> float:
    vector = torch.ones(1 << 22)
    best = min(_timed(lambda: dist.all_reduce(vector)) for _ in range(10))
    return 2 * (world - 1) / world * vector.nbytes / best


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def measured_run(spec: TrainSpec, seconds: float, device: Accelerator, ranks: int) -> MeasuredRun:
    return MeasuredRun(plan_workload(spec)[0], Strategy.from_spec(spec, ranks), device, ranks, seconds)


def row(name: str, run: MeasuredRun, device: Accelerator) -> Row:
    return Row(name, run.step_s, step_time(run.workload, run.strategy, device, run.devices_per_node).total)


def report(rows: list[Row], held_out: list[Row], layouts: list[Row], out: Path | None) -> None:
    for each in (*rows, *layouts):
        times = f"{each.measured_s * 1e3:9.1f} ms measured {each.predicted_s * 1e3:9.1f} predicted"
        print(f"{times} {each.error:+7.1%}  {each.name}")
    errors = sorted(abs(each.error) for each in held_out)
    within = f"{sum(error <= 0.2 for error in errors)} of {len(errors)} within 20 %"
    print(f"held out: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}; {within}")
    chosen = min(layouts, key=lambda each: each.predicted_s)
    best = min(layouts, key=lambda each: each.measured_s)
    longer = chosen.measured_s / best.measured_s - 1
    print(f"the plan ranked first of {len(layouts)} takes {longer:.1%} longer than the best")
    if out is not None:
        found = {"runs": rows, "layouts": layouts}
        out.write_text(json.dumps({name: [asdict(each) for each in of] for name, of in found.items()}))


if __name__ == "__main__":
    main()
