"""Backups: what is in a snapshot, what a further one stores, and what a killed one leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.control.backup.conftest import AT_S, NAME, Cluster

from raytide.control.backup.contents import _leads_out, contents_of, problem_of
from raytide.control.backup.place import place_of
from raytide.control.backup.repository import BackupSummary, Repository, find_restic, has_all
from raytide.control.backup.restore import below, find_snapshot, unpack
from raytide.control.backup.results import read_results
from raytide.control.backup.run import back_up, working
from raytide.control.backup.upkeep import create_repositories, forget
from raytide.control.bootstrap import local
from raytide.core.errors import ConfigError, ConflictError, NotFoundError, StorageError
from raytide.core.objects.endpoint import ServeSpec

MB = 1_000_000


def test_a_second_backup_after_one_more_checkpoint_stores_little_more_than_that(backed_up: Cluster) -> None:
    backed_up.checkpoint(20, 20 * MB)
    _, first = back_up(backed_up.place)
    assert first.added_bytes > 20 * MB
    backed_up.checkpoint(30, 5 * MB)
    backed_up.book(2, 50)
    _, second = back_up(backed_up.place)
    assert 5 * MB < second.added_bytes < 6 * MB, "the newest checkpoint, and what changed of the state"
    _, third = back_up(backed_up.place)
    assert third.added_bytes < MB
    last = read_results(backed_up.place.work_dir).backup
    assert (last.snapshot, last.error, last.added_bytes) == (third.snapshot, "", third.added_bytes)


def test_a_backup_goes_on_from_the_newest_snapshot_that_is_left(backed_up: Cluster) -> None:
    backed_up.checkpoint(20, 20 * MB)
    _, first = back_up(backed_up.place)
    _, second = back_up(backed_up.place)
    backed_up.place.hot.remove(second.snapshot)
    assert read_results(backed_up.place.work_dir).backup.snapshot == second.snapshot
    _, third = back_up(backed_up.place)
    assert [each.id for each in backed_up.place.hot.snapshots(NAME)] == [first.snapshot, third.snapshot]
    backed_up.place.hot.remove(first.snapshot)
    backed_up.place.hot.remove(third.snapshot)
    _, fourth = back_up(backed_up.place)
    assert [each.id for each in backed_up.place.hot.snapshots(NAME)] == [fourth.snapshot]


def test_records_that_are_written_meanwhile_are_in_it_whole_or_not_at_all(backed_up: Cluster) -> None:
    manifest, _ = back_up(backed_up.place)
    backed_up.book(2, 50)
    place = backed_up.place
    unpacked = unpack(place.hot, find_snapshot(place.hot, NAME), backed_up.folder / "scratch")
    assert unpacked.manifest == manifest
    assert {path.name for path in unpacked.staging.iterdir()} == {"backup.json", "state.db"}
    assert sorted(path.name for path in unpacked.run_dir.iterdir()) == ["cluster.yaml", "tokens.json"]


def test_what_describes_processes_of_this_machine_is_not_saved_and_the_bill_is(backed_up: Cluster) -> None:
    node = backed_up.run_dir / "nodes" / "node-7"
    for file in ("pids/api.json", "client.json", "cluster.json.part", "api.lock", "logs/api.log", "live.json"):
        path = backed_up.run_dir / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    node.mkdir(parents=True)
    for file in ("machine.json", "ended.json", "lock", "log", "process.json", "meter.json"):
        (node / file).write_text("{}")
    back_up(backed_up.place)
    place = backed_up.place
    run_dir = unpack(place.hot, find_snapshot(place.hot, NAME), backed_up.folder / "scratch").run_dir
    kept = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    bill = {"nodes/node-7/machine.json", "nodes/node-7/ended.json"}
    assert kept == {"cluster.yaml", "tokens.json", "cluster.json.part", *bill}


def test_a_checkpoint_that_is_not_whole_is_passed_over_for_the_one_before(cluster: Cluster) -> None:
    newest = cluster.checkpoint(20)
    (newest / "__0_0.distcp").write_bytes(b"torn")
    folders = contents_of(cluster.run_dir / "state.db").folders
    assert [Path(each.path).name for each in folders if each.kind == "checkpoint"] == ["step-00000010-0123abcd"]


def test_a_checkpoint_that_its_run_removes_meanwhile_is_saved_all_the_same(
    backed_up: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, checkpoint = Repository.backup, backed_up.checkpoint(20)

    def late(repository: Repository, paths: list[Path], **options: Any) -> BackupSummary:
        shutil.rmtree(checkpoint)
        return save(repository, paths, **options)

    monkeypatch.setattr(Repository, "backup", late)
    back_up(backed_up.place)
    place = backed_up.place
    unpacked = unpack(place.hot, find_snapshot(place.hot, NAME), backed_up.folder / "scratch")
    [saved] = [each for each in unpacked.manifest.contents.folders if each.kind == "checkpoint"]
    assert saved.path == str(checkpoint)
    assert problem_of(saved, below(unpacked.scratch, saved.stored_as)) == ""
    assert [path.name for path in checkpoint.parent.iterdir()] == ["step-00000010-0123abcd"]


def test_a_sealed_file_that_is_removed_meanwhile_fails_the_backup_and_leaves_no_snapshot(
    backed_up: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Repository.backup

    def late(repository: Repository, paths: list[Path], **options: Any) -> BackupSummary:
        (backed_up.folder / "data" / "tokens" / "00000.bin").unlink()
        return save(repository, paths, **options)

    monkeypatch.setattr(Repository, "backup", late)
    with pytest.raises(StorageError, match="tokens changed while it was saved"):
        back_up(backed_up.place)
    assert backed_up.place.hot.snapshots(NAME) == ()


@pytest.mark.parametrize(
    ("item", "is_there", "accepted"), [("run/a.part", False, True), ("run/a.part", True, False), ("x", False, False)]
)
def test_a_temporary_file_may_vanish_and_one_that_cannot_be_read_may_not(
    item: str, is_there: bool, accepted: bool, tmp_path: Path
) -> None:
    if is_there:
        (tmp_path / item).parent.mkdir()
        (tmp_path / item).touch()
    said = json.dumps({"message_type": "error", "item": str(tmp_path / item)})
    done = subprocess.CompletedProcess[str]([], 3, "", f"{said}\nWarning: at least one source file could not be read")
    assert has_all(done, [str(tmp_path / "run")]) is accepted
    assert not has_all(subprocess.CompletedProcess[str]([], 1, "", said), [str(tmp_path)])
    assert not has_all(subprocess.CompletedProcess[str]([], 3, "", ""), [str(tmp_path)])


def test_object_stores_and_missing_paths_are_named(cluster: Cluster) -> None:
    found = contents_of(cluster.run_dir / "state.db", ["/no/such/folder"])
    assert found.missing == ("/no/such/folder",)
    assert [each.kind for each in found.folders] == ["dataset", "run", "checkpoint"]


@pytest.mark.parametrize(
    "config",
    [
        {"dataset": {"sources": [{"dataset": "/no/a"}, {"dataset": "/no/b"}]}},
        {"dataset": "/no/a", "eval": {"dataset": "/no/b"}},
    ],
)
def test_all_data_that_an_unfinished_training_reads_is_named(cluster: Cluster, config: dict[str, Any]) -> None:
    spec = cluster.jobs[0].spec.model_copy(update={"config": {"out": str(cluster.out), **config}})
    cluster.store.submit_job(spec, "ana", AT_S)
    assert contents_of(cluster.run_dir / "state.db").missing == ("/no/a", "/no/b")


def test_all_that_an_endpoint_reads_is_named(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
    spec = ServeSpec(
        name="chat",
        model=str(tmp_path / "model"),
        weights="s3://models/newer",
        adapters={"mine": str(tmp_path / "adapter"), "lost": "/no/such/adapter"},
    )
    cluster.store.save_endpoint(spec, "ana", AT_S)
    found = contents_of(cluster.run_dir / "state.db")
    assert [each.path for each in found.folders if each.owner == "chat"] == [
        str(tmp_path / "model"),
        str(tmp_path / "adapter"),
    ]
    assert (found.remote, found.missing) == (("s3://models/newer",), ("/no/such/adapter",))


def test_a_backup_that_is_killed_leaves_nothing_that_a_later_run_trusts(backed_up: Cluster, restic: str) -> None:
    """restic is killed in the middle of its work, which takes a minute, and then the process that started it."""
    backed_up.checkpoint(20, 60 * MB)
    fake = backed_up.folder / "bin" / "restic"
    fake.parent.mkdir()
    saves = f'[ -n "$(find {backed_up.repository}/data -type f)" ]'
    killing = (
        f'*" backup "*) {restic} --limit-upload 1000 "$@" & until {saves}; do sleep 0.05; done; kill -9 $! $PPID;;'
    )
    fake.write_text(f'#!/bin/sh\ncase "$*" in {killing} *) exec {restic} "$@";; esac\n')
    fake.chmod(0o755)
    code = "from raytide.control.backup.place import place_of\nfrom raytide.control.backup.run import back_up\n"
    code += f"back_up(place_of({NAME!r}))"
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PATH": path}, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert backed_up.place.hot.snapshots(NAME) == ()
    with pytest.raises(NotFoundError, match="no snapshot"):
        find_snapshot(backed_up.place.hot, NAME)
    _, summary = back_up(backed_up.place)
    assert summary.bytes > 60 * MB
    assert backed_up.place.hot.check() == ()


def test_a_new_repository_is_not_asked_for_the_snapshot_of_an_earlier_one(
    backed_up: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(backed_up.place)
    shutil.rmtree(backed_up.place.hot.url)
    create_repositories(backed_up.place)
    starts: list[str] = []
    run = Repository._run

    def counted(self: Repository, command: list[str], *more: Any) -> subprocess.CompletedProcess[str]:
        starts.append(command[0])
        return run(self, command, *more)

    monkeypatch.setattr(Repository, "_run", counted)
    back_up(backed_up.place)
    back_up(backed_up.place)
    assert starts == ["backup", "backup"]


def test_two_backups_of_a_cluster_do_not_run_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytide.control.backup.run._WAIT_S", 0.0)
    with working(NAME), pytest.raises(ConflictError, match="another backup, restore or drill of cluster blue"):
        back_up(cluster.place)


def test_without_restic_the_error_names_the_package(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytide.control.backup.repository.shutil.which", lambda name, path=None: None)
    with pytest.raises(ConfigError, match="apt-get install restic"):
        back_up(cluster.place)
    assert "apt-get install restic" in read_results(cluster.place.work_dir).backup.error


def test_a_cluster_without_a_backup_section_is_told_what_to_add(cluster: Cluster) -> None:
    (cluster.run_dir / "cluster.yaml").write_text(local.DEFAULT_CONFIG.read_text())
    with pytest.raises(ConfigError, match="has no metadata"):
        place_of(NAME)
    with pytest.raises(NotFoundError, match="no cluster green"):
        place_of("green")


def test_the_retention_removes_snapshots_and_never_the_newest(backed_up: Cluster) -> None:
    for step in (20, 30):
        backed_up.checkpoint(step)
        back_up(backed_up.place)
    place = backed_up.place
    newest = place.hot.snapshots(NAME)[-1]
    assert place.hot.forget(NAME, {"last": 1}) == (1, 1)
    assert place.hot.snapshots(NAME) == (newest,)
    assert forget(place) == (1, 0)
    assert place.hot.snapshots("green") == ()


def test_a_cold_repository_gets_a_copy_that_stands_alone(backed_up: Cluster, restic: str) -> None:
    back_up(backed_up.place)
    hot = backed_up.place.hot
    cold = Repository(str(backed_up.folder / "cold"), hot.password_file, hot.cache_dir)
    assert cold.init(like=hot)
    assert not cold.init(like=hot)
    cold.copy_from(hot, [hot.snapshots(NAME)[-1].id])
    unpacked = unpack(cold, find_snapshot(cold, NAME), backed_up.folder / "scratch")
    assert unpacked.problems == ()
    assert create_repositories(backed_up.place) == []
    assert find_restic()


def test_a_model_of_links_to_files_elsewhere_is_not_taken_for_saved(tmp_path: Path) -> None:
    """Restic saves the links alone. What a model's digest leaves out does not count."""
    model, blob = tmp_path / "model", tmp_path / "blob"
    (model / ".venv").mkdir(parents=True)
    blob.write_bytes(b"weights")
    (model / ".venv" / "python").symlink_to("/usr/bin/python3")
    (model / "loop").symlink_to(model / "loop")
    (model / "config.json").write_text("{}")
    (model / "same.json").symlink_to(model / "config.json")
    assert not _leads_out(model)
    (model / "weights").symlink_to(blob)
    assert _leads_out(model)
