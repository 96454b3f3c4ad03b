"""One real embedded cluster for the whole session: a real Ray head, real raylets, the real controller and API."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import raytide as rt
from raytide.control import cluster
from raytide.control.client import Client
from raytide.control.embedded import LocalCluster
from raytide.core.data_spec import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.core.gang import GangSpec, Shape
from raytide.core.train_spec import ModelSpec, OptimSpec, TrainSpec
from raytide.pipelines.build import build
from raytide.pipelines.runner import InlineRunner

SPOT = {"ray.io/market-type": "spot"}
NAME = "live"


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    before = os.environ.get("RAYTIDE_HOME")
    os.environ["RAYTIDE_HOME"] = str(tmp_path_factory.mktemp("home"))
    try:
        yield cluster.up(name=NAME)
    finally:
        cluster.down(NAME)
        if before is None:
            del os.environ["RAYTIDE_HOME"]
        else:
            os.environ["RAYTIDE_HOME"] = before


@pytest.fixture
def tide(live: LocalCluster) -> Iterator[rt.Tide]:
    with rt.Tide(Client.from_run_dir(live.run_dir)) as connected:
        yield connected


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


@pytest.fixture
def raytide_cli(live: LocalCluster) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line in a process of its own."""

    def run(*args: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "raytide.cli", *args]
        environment = {**os.environ, "RAYTIDE_CLUSTER_NAME": NAME, "PYTHONPATH": live.environment()["PYTHONPATH"]}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)

    return run


@pytest.fixture
def eventually() -> Callable[..., None]:
    def wait(what: Callable[[], object], *, within_s: float = 90.0, every_s: float = 0.2) -> None:
        deadline = time.monotonic() + within_s
        while not what():
            assert time.monotonic() < deadline, f"it did not happen within {within_s:g} s"
            time.sleep(every_s)

    return wait
