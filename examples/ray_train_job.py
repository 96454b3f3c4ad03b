"""raytide's trainer inside Ray Train, which starts the workers and keeps the checkpoints. The workers run in a lease of
raytide's queue; with Ray Train's own ScalingConfig instead, it runs on any machine without a cluster.

eval "$(raytide status --ray)"; python ray_train_job.py DATASET OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig
from ray.train.torch import TorchTrainer

import raytide as rt
from raytide.actors.trainer.runners.ray_train import train_loop_per_worker

WORKERS = 2


def main(dataset: str, out: str) -> None:
    spec = rt.TrainSpec(
        dataset=str(Path(dataset).resolve()),  # Ray Train's workers stand in another directory
        out=str(Path(out).resolve()),
        model=rt.ModelSpec(dim=64, layers=2, heads=4, max_seq_len=128),
        steps=60,
        global_batch=8,
        micro_batch=4,
        seq_len=64,
        checkpoint_every=20,
    )
    ray.init()
    result = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=spec.model_dump(mode="json"),
        scaling_config=rt.scaling_config(nodes=WORKERS, cpus=1, name="ray-train-example"),
        run_config=RunConfig(name="tiny", storage_path=f"{spec.out}/ray", failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.3f}, checkpoint {result.checkpoint.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
