"""Measures for how long a checkpoint stops training. The benchmark runs in one process. The trainer's state has half a
gigabyte by default.

    python benchmarks/trainer/checkpoint_stall.py [--mb 512] [--runs 7] [--threads 2]
                                                   [--url s3://bucket/run]

Each run measures three things, one after the other:

- copy: the time to copy the whole state in memory. The target memory was used before.
- waited save: the time from the start of a save until the save is complete.
- stall: the time for which a save in the background stops training. The steps that run during this save
  are measured too.

Prints the median, the minimum and the maximum of each time in milliseconds. Also prints two ratios with their goals:
stall / copy <= 2, and stall / waited save <= 0.25.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.trainer import Trainer
from raytide.core.specs.train import ModelSpec, TrainSpec

VOCAB, SEED = 8192, 0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--mb", type=int, default=512, help="of state: weights and two moments in fp32")
    arguments.add_argument("--runs", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--url", help="where the checkpoints go; a temporary directory when left out")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, process_group.single_process() as mine:
        trainer = Trainer(spec_of(Path(folder), options.mb, options.url), mine)
        trainer.restore()
        trainer.step()
        times = measure(trainer, options.runs)
        size = sum(piece.local.nbytes for piece in trainer.state.shards())
        trainer.close()
    report(times, size, options.threads)


def spec_of(folder: Path, mb: int, url: str | None) -> TrainSpec:
    dim = 512
    layers = max(1, round((mb * 1e6 / 12 - VOCAB * dim) / (12 * dim * dim)))
    return TrainSpec(
        dataset=str(dataset(folder / "tokens")),
        out=str(folder / "run"),
        checkpoint_dir=url,
        model=ModelSpec(dim=dim, layers=layers, heads=8, max_seq_len=64),
        steps=10_000,
        global_batch=2,
        micro_batch=2,
        seq_len=64,
        seed=SEED,
        keep_checkpoints=1,
        export=False,
    )


def measure(trainer: Trainer, runs: int) -> dict[str, list[float]]:
    pieces = trainer.state.shards()
    kept = [torch.zeros_like(piece.local) for piece in pieces]
    times: dict[str, list[float]] = {
        name: [] for name in ("copy", "waited save", "stall", "step", "step beside a save")
    }

    def copy() -> None:
        for target, piece in zip(kept, pieces, strict=True):
            target.copy_(piece.local)

    def waited_save() -> None:
        trainer.save()
        trainer.checkpoints.wait()

    for _ in range(runs):
        times["step"].append(timed(trainer.step))
        times["copy"].append(timed(copy))
        times["waited save"].append(timed(waited_save))
        trainer.step()
        times["stall"].append(timed(trainer.save))
        while trainer.checkpoints.is_saving:
            times["step beside a save"].append(timed(trainer.step))
        trainer.checkpoints.wait()
    return times


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def report(times: dict[str, list[float]], size: int, threads: int) -> None:
    print(f"state {size / 1e6:.0f} MB, {threads} threads, seed {SEED}, {len(times['stall'])} runs; milliseconds")
    for name, values in times.items():
        print(f"{name:20} median {statistics.median(values):8.1f}   {min(values):8.1f} .. {max(values):8.1f}")
    for name, yardstick, goal in (("copy", times["copy"], 2.0), ("waited save", times["waited save"], 0.25)):
        ratios = [stall / whole for stall, whole in zip(times["stall"], yardstick, strict=True)]
        spread = f"{min(ratios):.3f} .. {max(ratios):.3f}"
        print(f"stall / {name:12} median {statistics.median(ratios):.3f}   {spread}   goal <= {goal}")


def dataset(path: Path) -> Path:
    tokens = np.random.default_rng(SEED).integers(0, VOCAB, 20_000).astype("<u2").tobytes()
    (path / "shards").mkdir(parents=True)
    (path / "shards/00000.bin").write_bytes(tokens)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text("{}")
    shard = {"file": "shards/00000.bin", "tokens": 20_000, "sha256": hashlib.sha256(tokens).hexdigest()}
    manifest = {"version": 1, "tokenizer": "tokenizer.json", "vocab_size": VOCAB, "eos_id": 0, "dtype": "uint16"}
    (path / "manifest.json").write_text(json.dumps({**manifest, "documents": 1, "tokens": 20_000, "shards": [shard]}))
    return path


if __name__ == "__main__":
    main()
