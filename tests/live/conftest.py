"""A small dataset, and a run over two spot members, for the session's cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import OptimSpec, TrainSpec
from raytide.pipelines.build import build
from raytide.pipelines.runners.inline import InlineRunner

SPOT = {"ray.io/market-type": "spot"}


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files of the standard library, built in this process."""
    folder = tmp_path_factory.mktemp("tokens")
    inputs = tuple(str(Path(os.__file__).parent / name) for name in ("os.py", "ast.py", "json", "email"))
    tokenizer = TokenizerSpec(train=TrainTokenizer(vocab_size=512, sample_documents=20))
    build(
        DataSpec(inputs=inputs, include=(".py",), tokenizer=tokenizer, out=str(folder / "dataset")),
        runner=InlineRunner(),
    )
    return folder / "dataset"


@pytest.fixture
def train_spec(dataset: Path, tmp_path: Path) -> Callable[..., TrainSpec]:
    """A run of two spot members, small enough that its length is a matter of steps."""

    def make(**changes: object) -> TrainSpec:
        spec = TrainSpec(
            name="tiny",
            dataset=str(dataset),
            out=str(tmp_path / "run"),
            model=ModelSpec(dim=64, layers=2, heads=4, max_seq_len=128),
            optim=OptimSpec(lr=3e-3, warmup_steps=5),
            steps=60,
            global_batch=8,
            micro_batch=4,
            seq_len=64,
            checkpoint_every=10,
            gang=GangSpec(shapes=(Shape(members=2, resources={"CPU": 1}, labels=SPOT),)),
        )
        return spec.model_copy(update=changes)

    return make
