"""The runbooks that need no running cluster: their commands work as they are written, in their order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests import runbook
from tests.control.backup.conftest import NAME, Cluster

from raytide.control.backup.run import back_up
from raytide.core.state import Store


@pytest.fixture
def variables(backed_up: Cluster) -> dict[str, str]:
    place = backed_up.place
    return {"REPOSITORY": place.settings.repository, "PASSWORD_FILE": place.settings.password_file, "CLUSTER": NAME}


def test_a_damaged_repository_is_replaced_and_what_is_left_of_it_is_rescued(
    backed_up: Cluster, variables: dict[str, str]
) -> None:
    backed_up.checkpoint(20, 6_000_000)
    back_up(backed_up.place)
    packs = [path for path in (backed_up.repository / "data").rglob("*") if path.is_file()]
    damaged = max(packs, key=lambda path: path.stat().st_size)
    body = damaged.read_bytes()
    damaged.chmod(0o600)
    damaged.write_bytes(body[: len(body) // 2] + bytes([body[len(body) // 2] ^ 1]) + body[len(body) // 2 + 1 :])
    printed = {}
    for command in runbook.commands("damaged-repository.md"):
        printed[command.partition(" --")[0]] = runbook.run(command, backed_up.folder, variables)
    assert list(printed) == [
        "raytide backup drill",
        'mv "$REPOSITORY" "$REPOSITORY.damaged"',
        "raytide backup init",
        "raytide backup run",
        "raytide backup list",
        "raytide backup restore",
    ]
    assert "everything in it is whole" in printed["raytide backup drill"], "the last of the two"
    assert list((backed_up.folder / "rescued").rglob("cluster.yaml"))


def test_a_moved_cluster_has_its_records_in_the_new_store(backed_up: Cluster, variables: dict[str, str]) -> None:
    state = f"sqlite:///{backed_up.folder / 'elsewhere' / 'new.db'}"
    first, second = runbook.commands("moving-a-cluster.md")
    assert "snapshot" in runbook.run(first, backed_up.folder, variables)
    backed_up.store.close()
    shutil.rmtree(backed_up.run_dir)
    runbook.run(second, backed_up.folder, {**variables, "STATE_URL": state})
    assert not (backed_up.run_dir / "state.db").exists()
    store = Store.open(state)
    try:
        assert store.job("job-1") == backed_up.jobs[0]
        assert store.orders.hold() is not None
    finally:
        store.close()


def test_restored_files_can_be_looked_at_without_a_cluster(
    backed_up: Cluster, variables: dict[str, str], tmp_path: Path
) -> None:
    back_up(backed_up.place)
    where = '--repository "$REPOSITORY" --password-file "$PASSWORD_FILE"'
    listed = json.loads(runbook.run(f"raytide backup list {where} --json", tmp_path, variables))
    shown = json.loads(
        runbook.run(f"raytide backup restore {listed[0]['id']} {where} --to x --json", tmp_path, variables)
    )
    assert shown["problems"] == []
    assert [path.read_text() for path in (tmp_path / "x").rglob("metrics.jsonl")] == ['{"step": 10}\n']
