"""A small cluster on disk, without processes: its run folder, its state, a training with a checkpoint, a dataset."""

from __future__ import annotations

import hashlib
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from tests.stores import new_store

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.manifest import FileRecord, Manifest
from raytide.actors.trainer.checkpoint.storage import LocalStore
from raytide.control.backup.place import BackupPlace, place_of
from raytide.control.backup.repository import Repository, find_restic
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import run_dir_of
from raytide.core.errors import ConfigError
from raytide.core.io import token_dataset
from raytide.core.io.storage import sha256
from raytide.core.io.token_dataset import Shard, TokenManifest
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec
from raytide.core.objects.ledger_entry import Entry, EntryKind
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.specs.data import DatasetVersionSpec
from raytide.core.state import Changes, Store

NAME, PASSWORD = "blue", "a long password\n"
AT_S = 1_800_000_000.0
SECOND_US = 1_000_000


@dataclass
class Cluster:
    """A cluster's files and records."""

    folder: Path
    store: Store
    jobs: list[Job] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return run_dir_of(NAME)

    @property
    def place(self) -> BackupPlace:
        return place_of(NAME)

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    @property
    def out(self) -> Path:
        return self.folder / "data" / "run"

    def checkpoint(self, step: int, size: int = 1000) -> Path:
        """Writes a sealed checkpoint whose bytes are those of no other step."""
        store, name = LocalStore(self.out / "checkpoints"), manifest.folder_name(step, "0123abcd")
        body = hashlib.shake_256(str(step).encode()).digest(size)
        with store.write(f"{name}/__0_0.distcp") as stream:
            stream.write(body)
        record = FileRecord(sha256=hashlib.sha256(body).hexdigest(), size=size)
        manifest.commit(
            store, name, Manifest(step=step, samples=step, digests={}, world=1, files={"__0_0.distcp": record})
        )
        return self.out / "checkpoints" / name

    def book(self, node: int, amount: int) -> None:
        """Books an hour of a node that is over."""
        at_us = node * 3600 * SECOND_US
        entry = Entry(f"node-{node}", at_us, at_us + SECOND_US, EntryKind.JOB, "job-1", "default", amount, amount)
        self.store.commit(Changes(at_s=AT_S, entries=(entry,)))


@pytest.fixture(scope="session")
def restic() -> str:
    try:
        return find_restic()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that asks for backups, with a running training at step 10, and a repository that does not exist yet."""
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path / "home"))
    run_dir = run_dir_of(NAME)
    run_dir.mkdir(parents=True, mode=0o700)
    (tmp_path / "password").write_text(PASSWORD)
    config = yaml.safe_load(local.DEFAULT_CONFIG.read_text()) | {"cluster_name": NAME}
    config["metadata"]["raytide"]["backup"] = {
        "repository": str(tmp_path / "repository"),
        "password_file": str(tmp_path / "password"),
        "drill_parts": 1,
    }
    (run_dir / "cluster.yaml").write_text(yaml.safe_dump(config))
    (run_dir / "tokens.json").write_text('{"token": {"user": "ana", "team": "*"}}')
    made = Cluster(tmp_path, new_store(run_dir))
    dataset = _dataset(tmp_path / "data" / "tokens")
    made.out.mkdir(parents=True)
    (made.out / "metrics.jsonl").write_text('{"step": 10}\n')
    made.checkpoint(10)
    spec = JobSpec(
        kind=JobKind.TRAIN,
        name="train",
        gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)),
        config={"out": str(made.out), "dataset": str(dataset), "steps": 100},
    )
    made.jobs.append(made.store.submit_job(spec, "ana", AT_S))
    found = token_dataset.load_manifest(str(dataset))
    version = DatasetVersionSpec.of(
        found, token_dataset.sha256_of(str(dataset)), name="tokens", location=str(dataset), job=""
    )
    made.store.datasets.register(version, "ana", AT_S)
    node = Node("node-7", "cpu2", "local-a", CapacityType.ON_DEMAND, 83_200, NodeState.READY, AT_S, started_at_s=AT_S)
    made.store.commit(Changes(at_s=AT_S, nodes=(node,)))
    made.book(1, 100)
    yield made
    made.store.close()


@pytest.fixture(scope="session")
def empty_repository(restic: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository for others to be copied from: making its key takes restic seconds."""
    folder = tmp_path_factory.mktemp("restic")
    (folder / "password").write_text(PASSWORD)
    Repository(str(folder / "repository"), folder / "password", folder / "cache").init()
    return folder / "repository"


@pytest.fixture
def backed_up(cluster: Cluster, empty_repository: Path) -> Cluster:
    """The cluster with an empty repository."""
    shutil.copytree(empty_repository, cluster.repository)
    return cluster


def _dataset(folder: Path) -> Path:
    folder.mkdir(parents=True)
    data = array("H", [5, 6, 0]).tobytes()
    (folder / "00000.bin").write_bytes(data)
    (folder / "tokenizer.json").write_bytes(b"{}")
    found = TokenManifest(
        tokenizer_sha256=sha256(b"{}"),
        vocab_size=300,
        eos_id=0,
        dtype="uint16",
        documents=1,
        tokens=3,
        shards=(Shard(file="00000.bin", tokens=3, sha256=sha256(data)),),
    )
    (folder / "manifest.json").write_bytes(found.to_bytes())
    return folder
