"""Measures the model FLOPs utilisation of the trainer's loop and of a plain compiled loop on one GPU.

The script needs only torch, numpy, pydantic and safetensors. Each row is a shape with some techniques. After a
warm-up, each step is timed until the device has finished it. Prints the median, the 10th and the 90th percentile,
and the peak of memory. The FLOPs of a token are 6 N + 12 L d T, the convention of published figures. N is the number
of weights, without embeddings that are only looked up. The utilisation is relative to the peak of dense bf16. Goals:
45 % at 350M and 50 % at 1B.

    python benchmarks/trainer/train_gpu.py [--shapes 350m 1b] [--rows plain eager compile ...]
                                           [--steps 20] [--json FILE]
"""

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.hf.init_weights import initialise
from raytide.actors.trainer.hf.model_source import open_data, resolve_model
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.trainer import Trainer
from raytide.core.specs.train import MemorySpec, ModelSpec, OptimSpec, TrainSpec

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
VOCAB = 32768
WARM_UP = 5
SHAPES = {
    "tiny": (ModelSpec(dim=64, layers=2, heads=2, max_seq_len=64), 64, 4, 2),
    "350m": (ModelSpec(dim=1024, layers=24, heads=16, max_seq_len=1024), 1024, 64, 16),
    "1b": (ModelSpec(dim=2048, layers=18, heads=16, max_seq_len=2048, tie_embeddings=False), 2048, 32, 8),
}
"""Model, sequence length, sequences in a step and in a microbatch."""
ROWS = {
    "eager": {},
    "compile": {"compile": True},
    "compile+chunk": {"compile": True, "loss_chunk": 4096},
    "compile+chunk+fp8": {"compile": True, "loss_chunk": 4096, "precision": "fp8"},
    "compile+chunk+selective": {"compile": True, "loss_chunk": 4096, "checkpointing": "selective"},
    "compile+chunk+full": {"compile": True, "loss_chunk": 4096, "checkpointing": "full"},
}


@dataclass
class Row:
    shape: str
    what: str
    tokens_per_s: float
    tflops: float
    mfu: float | None
    p10_s: float
    median_s: float
    p90_s: float
    peak_gib: float
    error: str = ""


def write_dataset(path: Path, tokens: int, vocab: int) -> Path:
    body = np.random.default_rng(0).integers(0, vocab, size=tokens).astype("<u2").tobytes()
    path.mkdir(parents=True)
    (path / "0.bin").write_bytes(body)
    shard = {"file": "0.bin", "tokens": tokens, "sha256": hashlib.sha256(body).hexdigest()}
    manifest = {"version": 1, "tokenizer": "tokenizer.json", "vocab_size": vocab, "eos_id": 0, "dtype": "uint16"}
    (path / "manifest.json").write_text(json.dumps({**manifest, "documents": 1, "tokens": tokens, "shards": [shard]}))
    return path


class Plain:
    """The loop that one would write by hand: bf16 autocast, SDPA, fused AdamW, torch.compile over the whole model."""

    def __init__(self, spec: TrainSpec, arch, device: torch.device, backend: str) -> None:
        self.spec, self.device = spec, device
        with torch.device(device):
            self.model = Transformer(arch, spec.seq_len)
        initialise(self.model, spec.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=spec.optim.lr, betas=(0.9, 0.95), fused=True)
        self.run = torch.compile(self.loss, backend=backend)

    def loss(self, inputs, targets):
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def step(self) -> None:
        micros = self.spec.global_batch // self.spec.micro_batch
        for _ in range(micros):
            size = (self.spec.micro_batch, self.spec.seq_len + 1)
            rows = torch.randint(self.model.arch.vocab_size, size, device=self.device)
            (self.run(rows[:, :-1], rows[:, 1:]) / micros).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def spec_of(shape: str, row: dict, folder: str, backend: str) -> TrainSpec:
    model, seq_len, global_batch, micro_batch = SHAPES[shape]
    options = dict(row)
    precision = options.pop("precision", "bf16")
    return TrainSpec(
        dataset=f"{folder}/data-{shape}",
        out=f"{folder}/run",
        model=model,
        optim=OptimSpec(lr=3e-4),
        memory=MemorySpec(**options, compile_backend=backend),
        precision=precision,
        steps=10_000,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seq_len=seq_len,
    )


def times(step, steps: int, device: torch.device) -> list[float]:
    """Returns the seconds of each step."""
    out = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        out.append(time.perf_counter() - began)
    return out


def flops_per_token(spec: TrainSpec, model: Transformer) -> float:
    weights = sum(weight.numel() for weight in model.parameters())
    lookup = 0 if model.head is None or model.embedding is None else model.embedding.weight.numel()
    return 6 * (weights - lookup) + 12 * spec.model.layers * spec.model.dim * spec.seq_len


def measure(shape: str, what: str, folder: str, args: argparse.Namespace, device: torch.device) -> Row:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    spec = spec_of(shape, ROWS.get(what, {}), folder, args.backend)
    with process_group.single_process() as mine:
        if what == "plain":
            plain = Plain(spec, resolve_model(spec, open_data(spec)).arch, device, args.backend)
            step, model = plain.step, plain.model
        else:
            trainer = Trainer(spec, mine)
            step, model = trainer.step, trainer.model_parts[0]
        per_token = flops_per_token(spec, model)
        times(step, args.warm_up, device)
        taken = sorted(times(step, args.steps, device))
    median = statistics.median(taken)
    speed = spec.global_batch * spec.seq_len / median
    name = torch.cuda.get_device_name() if cuda else ""
    peak = next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
    return Row(
        shape,
        what,
        speed,
        speed * per_token / 1e12,
        speed * per_token / peak if peak else None,
        taken[len(taken) // 10],
        median,
        taken[len(taken) * 9 // 10],
        torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["350m", "1b"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", default=["plain", *ROWS], choices=["plain", *ROWS])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--json", help="also write the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            vocab = 256 if shape == "tiny" else VOCAB
            write_dataset(Path(folder) / f"data-{shape}", 20_000 if shape == "tiny" else 50_000_000, vocab)
            for what in args.rows:
                try:
                    row = measure(shape, what, folder, args, device)
                except torch.OutOfMemoryError as error:
                    row = Row(shape, what, 0, 0, None, 0, 0, 0, 0, str(error).splitlines()[0])
                rows.append(row)
                mfu = "" if row.mfu is None else f", MFU {row.mfu:.1%}"
                print(
                    f"{shape:5} {what:26} {row.tokens_per_s:10,.0f} tokens/s {row.tflops:8.2f} TFLOP/s{mfu}; step "
                    f"{row.median_s:.4f} s ({row.p10_s:.4f} to {row.p90_s:.4f}), {row.peak_gib:.1f} GiB {row.error}"
                )
    if args.json:
        Path(args.json).write_text(json.dumps([vars(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
