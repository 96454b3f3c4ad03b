"""raytide's trainer inside Ray Train, which starts the workers and keeps the checkpoints. On a machine of one's own:

python ray_train_job.py DATASET OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raytide.actors.trainer.runners.ray_train import train_loop_per_worker
from raytide.core.specs.train import ModelSpec, TrainSpec

WORKERS = 2


def main(dataset: str, out: str) -> None:
    spec = TrainSpec(
        dataset=str(Path(dataset).resolve()),  # Ray Train's workers stand in another directory
        out=str(Path(out).resolve()),
        model=ModelSpec(dim=64, layers=2, heads=4, max_seq_len=128),
        steps=60,
        global_batch=8,
        micro_batch=4,
        seq_len=64,
        checkpoint_every=20,
    )
    result = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=spec.model_dump(mode="json"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name="tiny", storage_path=f"{spec.out}/ray", failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.3f}, checkpoint {result.checkpoint.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
