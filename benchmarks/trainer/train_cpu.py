"""Compares the tokens per second of the trainer's loop with those of a plain nanoGPT-style loop.

Both loops have the same model, data and optimiser. They run in this process and take turns. The ratio of a pair is
the trainer's speed divided by the plain loop's speed, and the result is the median of the pairs. Also prints the
share of a step that is spent waiting for data.

    python benchmarks/trainer/train_cpu.py [--pairs 5] [--steps 8] [--threads 2]
"""

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.hf.init_weights import initialise
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.trainer import Trainer
from raytide.core.specs.train import ModelSpec, OptimSpec, TrainSpec

VOCAB = 4096
WARM_UP = 2


def write_dataset(path: Path, tokens: int) -> Path:
    body = np.random.default_rng(0).integers(0, VOCAB, size=tokens).astype("<u2").tobytes()
    path.mkdir(parents=True)
    (path / "0.bin").write_bytes(body)
    shard = {"file": "0.bin", "tokens": tokens, "sha256": hashlib.sha256(body).hexdigest()}
    manifest = {"version": 1, "tokenizer": "tokenizer.json", "vocab_size": VOCAB, "eos_id": 0, "dtype": "uint16"}
    (path / "manifest.json").write_text(json.dumps({**manifest, "documents": 1, "tokens": tokens, "shards": [shard]}))
    return path


class Plain:
    """The loop that one would write by hand: random windows of a memory map, mean loss, clip, fused AdamW."""

    def __init__(self, spec: TrainSpec, arch) -> None:
        self.spec, self.lr = spec, spec.optim.lr
        self.tokens = np.memmap(Path(spec.dataset) / "0.bin", dtype="<u2", mode="r")
        self.model = Transformer(arch, spec.seq_len)
        initialise(self.model, spec.seed)
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim >= 2], "weight_decay": spec.optim.weight_decay},
            {"params": [p for p in self.model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (spec.optim.beta1, spec.optim.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=betas, eps=spec.optim.eps, fused=True)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.spec.seq_len
        starts = torch.randint(len(self.tokens) - length, (self.spec.micro_batch,)).tolist()
        rows = [torch.from_numpy(self.tokens[start : start + length + 1].astype(np.int64)) for start in starts]
        stacked = torch.stack(rows)
        return stacked[:, :-1], stacked[:, 1:]

    def step(self) -> float:
        micros = self.spec.global_batch // self.spec.micro_batch
        total = 0.0
        for _ in range(micros):
            inputs, targets = self.batch()
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()) / micros
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def tokens_per_s(spec: TrainSpec, step, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return steps * spec.global_batch * spec.seq_len / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, process_group.single_process() as mine:
        spec = TrainSpec(
            dataset=str(write_dataset(Path(folder) / "data", 2_000_000)),
            out=f"{folder}/run",
            model=ModelSpec(dim=args.dim, layers=args.layers, heads=args.dim // 32, max_seq_len=256),
            optim=OptimSpec(lr=3e-4),
            steps=(args.pairs + 1) * args.steps + WARM_UP,
            global_batch=16,
            micro_batch=8,
            seq_len=256,
        )
        trainer = Trainer(spec, mine)
        plain = Plain(spec, trainer.model_source.arch)
        for _ in range(WARM_UP):
            first = trainer.step(), plain.step()
        ratios, waits, results = [], [], []
        for pair in range(args.pairs):
            sides = {"ours": lambda: results.append(trainer.step()), "plain": plain.step}
            order = ("ours", "plain") if pair % 2 == 0 else ("plain", "ours")
            speed = {name: tokens_per_s(spec, sides[name], args.steps) for name in order}
            ratios.append(speed["ours"] / speed["plain"])
            waits.append(sum(r.data_s for r in results) / sum(r.step_s for r in results))
            results.clear()
            print(
                f"pair {pair}: ours {speed['ours']:,.0f} tokens/s, plain {speed['plain']:,.0f}, ratio "
                f"{ratios[-1]:.3f}; data wait {waits[-1]:.2%} of a step"
            )
    weights = sum(weight.numel() for weight in plain.model.parameters())
    print(f"losses after warm-up: ours {first[0].loss:.4f}, plain {first[1]:.4f} (other samples, seed 0)")
    print(f"{weights / 1e6:.1f}M weights, {args.threads} threads, {args.steps} steps a side")
    print(
        f"ours / plain: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, "
        f"{args.pairs} pairs); data wait at most {max(waits):.2%}"
    )


if __name__ == "__main__":
    main()
