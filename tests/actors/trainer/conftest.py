"""A tiny token dataset, a spec for it, and ranks as processes."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing.util
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.actors.trainer import trainer_ranks

from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import OptimSpec, TrainSpec

VOCAB = 96


@pytest.fixture(scope="session", autouse=True)
def _short_socket_paths() -> None:
    """The forkserver's socket lies where temporary files do when it is first used, and some tests move these."""
    multiprocessing.util.get_temp_dir()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_dataset(path: Path, *, tokens: int = 6000, shard_tokens: tuple[int, ...] = (2500, 1, 3499)) -> Path:
    """Token t follows t-1 by a noisy rule, so a model can learn something."""
    random = np.random.default_rng(0)
    stream = np.cumsum(random.choice([1, 2, 5], size=tokens, p=[0.7, 0.2, 0.1])) % VOCAB
    (path / "shards").mkdir(parents=True)
    shards, start = [], 0
    for index, count in enumerate(shard_tokens):
        body = stream[start : start + count].astype("<u2").tobytes()
        (path / f"shards/{index:05d}.bin").write_bytes(body)
        shards.append({"file": f"shards/{index:05d}.bin", "tokens": count, "sha256": hashlib.sha256(body).hexdigest()})
        start += count
    manifest = {
        "version": 1,
        "tokenizer": "tokenizer.json",
        "vocab_size": VOCAB,
        "eos_id": 0,
        "dtype": "uint16",
        "documents": 1,
        "tokens": tokens,
        "shards": shards,
    }
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="session")
def make_spec(dataset: Path) -> Callable[[Path], TrainSpec]:
    def make(out: Path) -> TrainSpec:
        return TrainSpec(
            dataset=str(dataset),
            out=str(out),
            model=ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, max_seq_len=64),
            optim=OptimSpec(lr=3e-3, warmup_steps=2),
            steps=10,
            global_batch=6,
            micro_batch=2,
            seq_len=32,
            checkpoint_every=100,
            export=False,
            collective_timeout_s=30.0,
        )

    return make


@pytest.fixture
def spec(make_spec: Callable[[Path], TrainSpec], tmp_path: Path) -> TrainSpec:
    return make_spec(tmp_path / "run")


@pytest.fixture
def bucket(aws: None) -> str:
    """The URL of an empty bucket."""
    import boto3

    name = uuid.uuid4().hex
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"


RunRanks = Callable[..., list[Any]]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """`run_ranks(world, work, *args)`: what `work(*args, rank, world, meeting place)` gives in each rank's process."""
    meets = (str(tmp_path / f"meet-{number}") for number in itertools.count())

    def run(world: int, work: Callable[..., Any], *args: Any, dying: Collection[int] = ()) -> list[Any]:
        return trainer_ranks.run(world, next(meets), work, args, timeout_s=300.0, dying=dying)

    return run
