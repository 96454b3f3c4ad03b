"""A cluster that was lost as a whole is restored: its records, its files, and what its records name."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.control.backup.conftest import NAME, Cluster
from tests.stores import NAME as STATE

from raytide.actors.trainer.checkpoint.verify import verify
from raytide.control.backup.repository import Repository, RepositorySnapshot
from raytide.control.backup.restore import (
    SKIPPED_NUMBERS,
    below,
    find_snapshot,
    put_in_place,
    restore_cluster,
    unpack,
)
from raytide.control.backup.run import MANIFEST, back_up
from raytide.control.bootstrap.cluster_record import run_dir_of
from raytide.core.errors import ConflictError, NotFoundError, StorageError
from raytide.core.state import Store


def lose(cluster: Cluster) -> Repository:
    """Removes everything but the repository and its password."""
    repository = cluster.place.hot
    cluster.store.close()
    shutil.rmtree(cluster.run_dir)
    shutil.rmtree(cluster.folder / "data")
    return repository


def put_on_another_disk(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets nothing be renamed out of folders of this name, as from one file system to another."""
    rename = Path.rename

    def across(self: Path, target: Path) -> Path:
        if any(parent.name.startswith(scratch) for parent in self.parents):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", across)


@pytest.mark.parametrize("disks", [1, 2])
def test_a_lost_cluster_is_restored_with_what_its_records_name(
    backed_up: Cluster, disks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(backed_up.place)
    repository = lose(backed_up)
    if disks == 2:
        put_on_another_disk("restore-", monkeypatch)
    restored = restore_cluster(repository, find_snapshot(repository, None), run_dir_of(NAME))
    assert restored.problems == ()
    assert (backed_up.out / "metrics.jsonl").read_text() == '{"step": 10}\n'
    assert [(each.step, each.state) for each in verify(str(backed_up.out))] == [(10, "whole")]
    assert (backed_up.run_dir / "tokens.json").read_text() == '{"token": {"user": "ana", "team": "*"}}'
    store = Store.open(f"sqlite:///{backed_up.run_dir / STATE}")
    assert store.job("job-1") == backed_up.jobs[0]
    assert sum(entry.amount_micro_usd for entry in store.books.entries()) == 100
    hold = store.orders.hold()
    assert hold is not None and hold.reason == f"the state was restored from snapshot {restored.snapshot}"
    assert store.load().next_node > SKIPPED_NUMBERS, (
        "machines bought after the backup have ids that are not given again"
    )
    store.close()
    assert [path.name for path in (backed_up.run_dir.parent.parent / "backup" / NAME).glob("restore-*")] == []


def test_what_exists_is_never_overwritten(backed_up: Cluster) -> None:
    back_up(backed_up.place)
    repository = backed_up.place.hot
    snapshot = find_snapshot(repository, NAME)
    with pytest.raises(ConflictError, match="holds a cluster already"):
        restore_cluster(repository, snapshot, backed_up.run_dir)
    shard = backed_up.folder / "data" / "tokens" / "00000.bin"
    shard.write_bytes(b"changed")
    restored = restore_cluster(repository, snapshot, run_dir_of("green"))
    assert [problem for problem in restored.problems if str(shard) in problem and "move it away" in problem]
    assert shard.read_bytes() == b"changed"
    assert str(backed_up.out) in restored.folders


def test_a_restore_goes_on_where_a_killed_one_stopped(backed_up: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    back_up(backed_up.place)
    repository = lose(backed_up)
    snapshot = find_snapshot(repository, NAME)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("raytide.control.backup.restore._put_state", killed)
        with pytest.raises(KeyboardInterrupt):
            restore_cluster(repository, snapshot, run_dir_of(NAME))
    assert not (backed_up.run_dir / "cluster.yaml").exists(), "nothing would start"
    assert restore_cluster(repository, snapshot, run_dir_of(NAME)).problems == ()
    Store.open(f"sqlite:///{backed_up.run_dir / STATE}").close()


def test_a_damaged_folder_is_left_out_and_named_and_the_rest_is_restored(backed_up: Cluster) -> None:
    back_up(backed_up.place)
    repository = lose(backed_up)
    snapshot = find_snapshot(repository, NAME)
    unpacked = unpack(repository, snapshot, backed_up.folder / "scratch")
    [saved] = [each for each in unpacked.manifest.contents.folders if each.kind == "checkpoint"]
    file = below(unpacked.scratch, saved.stored_as) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    restored = put_in_place(unpacked, run_dir_of(NAME))
    [problem] = restored.problems
    assert "has 999 bytes of 1000" in problem
    assert not Path(saved.path).exists()
    assert str(backed_up.folder / "data" / "tokens") in restored.folders
    assert (backed_up.run_dir / STATE).exists()


def test_a_password_that_is_wrong_and_a_repository_that_is_not_there_are_said(backed_up: Cluster) -> None:
    back_up(backed_up.place)
    place = backed_up.place
    wrong = backed_up.folder / "wrong"
    wrong.write_text("another\n")
    with pytest.raises(StorageError, match="does not open the repository"):
        find_snapshot(Repository(place.hot.url, wrong, place.hot.cache_dir), NAME)
    nowhere = Repository(str(backed_up.folder / "nowhere"), place.hot.password_file, place.hot.cache_dir)
    with pytest.raises(NotFoundError, match="no backup repository"):
        find_snapshot(nowhere, NAME)
    with pytest.raises(NotFoundError, match="no snapshot latest of cluster green"):
        find_snapshot(place.hot, "green")


def test_a_folder_reached_by_a_link_comes_back_where_the_records_name_it(backed_up: Cluster, tmp_path: Path) -> None:
    data, elsewhere = backed_up.folder / "data", tmp_path / "disk"
    data.rename(elsewhere)
    data.symlink_to(elsewhere)
    back_up(backed_up.place)
    repository = backed_up.place.hot
    backed_up.store.close()
    shutil.rmtree(backed_up.run_dir)
    shutil.rmtree(elsewhere)
    data.unlink()
    assert restore_cluster(repository, find_snapshot(repository, NAME), run_dir_of(NAME)).problems == ()
    assert [(each.step, each.state) for each in verify(str(backed_up.out))] == [(10, "whole")]


@pytest.mark.parametrize("text", ['{"version": 2, "added_later": 1}', '{"version": 1', "[]"])
def test_a_manifest_that_cannot_be_read_names_the_earlier_snapshots(tmp_path: Path, text: str) -> None:
    class OfSnapshot(Repository):
        def restore(self, snapshot: str, target: Path, *, include: Sequence[str] = ()) -> tuple[str, ...]:
            below(target, "/staging").mkdir()
            (below(target, "/staging") / MANIFEST).write_text(text)
            return ()

    repository = OfSnapshot(str(tmp_path), tmp_path / "password", tmp_path / "cache")
    with pytest.raises(StorageError, match="of snapshot 0123abcd is damaged or from another release: ") as caught:
        unpack(repository, RepositorySnapshot("0123abcd", 1.0, NAME, ("/staging",)), tmp_path / "scratch")
    assert "earlier snapshot" in caught.value.hint
