"""Trains with Ray Train's elastic TorchTrainer, in the way that Ray Train's guide describes. elastic_cpu.py compares
raytide with this script.

    python elastic_ray_train.py CONFIG.json

The script runs in the cluster's own Python. It trains a decoder of the same size as raytide's on the same tokens,
with DistributedDataParallel over gloo and regular checkpoints. Rank 0 writes a line for each step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def train_loop(config: dict[str, Any]) -> None:
    import numpy as np
    import torch
    from ray import train
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    context = train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = np.fromfile(config["tokens"], dtype="<u2").astype(np.int64)
    dim, seq_len, batch = config["dim"], config["seq_len"], config["global_batch"]
    layer = nn.TransformerEncoderLayer(dim, config["heads"], 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, config["layers"], enable_nested_tensor=False)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(config["vocab"], dim), "body": body, "head": nn.Linear(dim, config["vocab"])}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begun = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begun = state["step"]
    whole = _Whole(model, seq_len)
    replicated = DistributedDataParallel(whole) if world > 1 else whole
    mine = slice(batch * rank // world, batch * (rank + 1) // world)
    with open(config["out"], "a") as out:
        for step in range(begun, config["steps"]):
            chance = np.random.default_rng(step)
            starts = chance.integers(0, len(tokens) - seq_len - 1, size=batch)[mine]
            rows = torch.from_numpy(np.stack([tokens[start : start + seq_len + 1] for start in starts]))
            loss = nn.functional.cross_entropy(replicated(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                line = {"step": step + 1, "at_s": time.time(), "world": world, "node": context.get_node_rank()}
                out.write(json.dumps(line) + "\n")
                out.flush()
            if (step + 1) % config["checkpoint_every"] == 0:
                _report(rank, step + 1, model, optimizer)


class _Whole:
    """Built late, since the driver has no torch."""

    def __new__(cls, parts: Any, seq_len: int) -> Any:
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = parts
                self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(seq_len))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                hidden = self.parts["body"](self.parts["embed"](x), mask=self.mask, is_causal=True)
                return self.parts["head"](hidden)

        return Model()


def _report(rank: int, step: int, model: Any, optimizer: Any) -> None:
    import torch
    from ray import train

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = train.Checkpoint.from_directory(folder)
        train.report({"step": step}, checkpoint=checkpoint)


def main() -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    config = json.loads(Path(sys.argv[1]).read_text())
    ray.init()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo", timeout_s=int(config["collective_timeout_s"])),
        scaling_config=ScalingConfig(
            num_workers=(config["at_least"], config["members"]), elastic_resize_monitor_interval_s=5.0
        ),
        run_config=RunConfig(
            name="yardstick",
            storage_path=config["storage"],
            failure_config=FailureConfig(max_failures=10),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    main()
