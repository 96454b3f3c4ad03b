"""One cluster of its own for a storm, with a small dataset, a small model, and fewer nodes than the storm wants."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tests.soak.work import Corpus

from raytide.actors.trainer.runners.local import train_local
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec
from raytide.pipelines.build import build
from raytide.pipelines.runners.inline import InlineRunner

MOST_NODES = {"cpu2": 2, "cpu1.spot": 3}
IDLE_TIMEOUT_S = 5
NAME = "soak"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    inputs = tuple(str(Path(os.__file__).parent / name) for name in ("os.py", "ast.py", "json", "email"))
    tokenizer = TokenizerSpec(train=TrainTokenizer(vocab_size=512, sample_documents=20))
    dataset = str(folder / "dataset")
    build(DataSpec(inputs=inputs, include=(".py",), tokenizer=tokenizer, out=dataset), runner=InlineRunner())
    model = ModelSpec(dim=32, layers=1, heads=2, max_seq_len=128)
    spec = TrainSpec(dataset=dataset, out=str(folder / "run"), model=model, steps=2, global_batch=2, seq_len=64)
    train_local(spec)
    return Corpus(inputs, dataset, spec.out + "/model", folder / "out")


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """The embedded fleet, made so small that jobs and replicas wait for each other's nodes."""
    body = yaml.safe_load(local.DEFAULT_CONFIG.read_text())
    for name, most in MOST_NODES.items():
        body["available_node_types"][name] |= {"max_workers": most, "idle_timeout_s": IDLE_TIMEOUT_S}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


@pytest.fixture
def stormy(tmp_path: Path, config_path: Path) -> Iterator[LocalCluster]:
    with local.temporary(tmp_path / "home", config_path, NAME) as up:
        yield up


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Straight to the terminal, whatever pytest captures: the seed must be seen while the storm still blows. One of
    several workers has no terminal, and shows it with a failure."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    reporter = request.config.pluginmanager.getplugin("terminalreporter")

    def write(line: str) -> None:
        if reporter is None:
            sys.stdout.write(f"{line}\n")
            return
        with capture.global_and_fixture_disabled():
            reporter.write_line(line)

    return write
