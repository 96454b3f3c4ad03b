"""A plain TorchTrainer, with raytide's scaling configuration (`leased`) or Ray's own; under `ray job submit`."""

from __future__ import annotations

import os
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import raytide as rt


def loop() -> str:
    import torch
    import torch.distributed as dist

    total = torch.tensor([ray.train.get_context().get_world_rank() + 1.0])
    dist.all_reduce(total)
    labels = ray.get_runtime_context().get_node_labels()
    group = ray.util.get_current_placement_group()
    assert group is not None
    return f"{total.item()} {labels['raytide.io/node-id']} {group.id.hex()}"


def main(how: str, storage: str) -> None:
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    ray.init()
    if how == "leased":
        scaling = rt.scaling_config(nodes=2, gpus=4, name="leased")
    else:
        scaling = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 4})
    result = TorchTrainer(
        loop,
        scaling_config=scaling,
        torch_config=TorchConfig(backend="gloo"),  # no GPU computes here
        run_config=RunConfig(name=how, storage_path=storage),
    ).fit()
    sys.stdout.write(f"trained {result.return_value}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
