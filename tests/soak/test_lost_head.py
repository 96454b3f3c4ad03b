"""The head of a cluster and all its folders are lost in the middle of a training; its runbook brings them back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tests import runbook
from tests.soak.work import Corpus

import raytide as rt
from raytide.control.backup.place import place_of
from raytide.control.backup.repository import find_restic
from raytide.control.backup.results import read_results
from raytide.control.backup.run import back_up
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster
from raytide.control.bootstrap.wiring import local_provider
from raytide.control.client import ApiClient
from raytide.core.errors import ConfigError
from raytide.core.io.process import Process, kill_marked
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobState
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec
from raytide.core.state import Store
from raytide.ledger.reconcile import reconcile

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
NAME = "lost"


@pytest.fixture
def losable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A cluster with a repository; after its first backup only the test asks for more."""
    try:
        find_restic()
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path / "home"))
    body = yaml.safe_load(local.DEFAULT_CONFIG.read_text()) | {"cluster_name": NAME}
    where = {"repository": str(tmp_path / "repository"), "password_file": str(tmp_path / "password")}
    body["metadata"]["raytide"]["backup"] = {**where, "every_s": 86_400, "drill_parts": 1}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(body))
    (tmp_path / "password").write_text("a long password\n")
    try:
        yield local.up(tmp_path / "cluster.yaml", NAME, owner=Process.of(os.getpid()))
    finally:
        local.down(NAME)


def test_a_cluster_that_lost_its_run_folder_and_database_goes_on_from_its_backup(
    losable: LocalCluster, corpus: Corpus, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    place = place_of(NAME)
    eventually(lambda: read_results(place.work_dir).backup.at_s > 0, within_s=180.0)  # the first on its schedule
    gang = GangSpec(shapes=(Shape(members=1, resources={"CPU": 1}),))
    spec = TrainSpec(
        dataset=corpus.dataset,
        out=str(tmp_path / "run"),
        model=ModelSpec(dim=32, layers=1, heads=2, max_seq_len=128),
        steps=1500,
        global_batch=2,
        seq_len=64,
        checkpoint_every=20,
        gang=gang,
    )
    with rt.Client(ApiClient.from_run_dir(losable.run_dir)) as tide:
        run = tide.train(spec)
        eventually(lambda: int(run.refresh().progress.get("step", 0)) >= 100, within_s=180.0)
        back_up(place)
        eventually(lambda: int(run.refresh().progress.get("step", 0)) >= 200, within_s=180.0)
    first = first_step(spec)
    kill_marked(MARK, losable.cluster_id)
    shutil.rmtree(losable.run_dir)
    shutil.rmtree(spec.out)

    variables = {
        "REPOSITORY": str(tmp_path / "repository"),
        "PASSWORD_FILE": str(tmp_path / "password"),
        "CLUSTER": NAME,
    }
    for command in runbook.commands("lost-head.md"):
        printed = runbook.run(command, tmp_path, variables)
        if "status" in command:
            assert "on hold" in printed
            assert not (losable.run_dir / "nodes" / "node-2").exists()
    assert max(saved_steps(spec)) >= 80
    with rt.Client(ApiClient.from_run_dir(losable.run_dir)) as tide:
        resumed = tide.job(run.id)
        resumed.wait(timeout_s=600.0)
        assert resumed.refresh().state is JobState.SUCCEEDED
        assert int(resumed.progress["step"]) == spec.steps
    assert first_step(spec) == first, "it went on from a checkpoint: a run from the start would have other times"
    found = local.load(losable.run_dir)
    assert isinstance(found, LocalCluster)
    store = Store.open(found.state_url)
    try:
        eventually(lambda: reconcile(local_provider(found).machines(), store.books.entries()) == ())
        booked = sum(entry.amount_micro_usd for entry in store.books.entries())
        assert booked == sum(store.books.booked("kind").values()) > 0
    finally:
        store.close()
    closed = local.down(NAME)
    assert closed is not None and closed.differences == ()


def saved_steps(spec: TrainSpec) -> list[int]:
    return sorted(
        int(path.parent.name.split("-")[1]) for path in (Path(spec.out) / "checkpoints").glob("step-*/manifest.json")
    )


def first_step(spec: TrainSpec) -> str:
    """Returns the metrics of the first step, with its times."""
    return (Path(spec.out) / "metrics.jsonl").read_text().partition("\n")[0]
