"""The tasks of a cluster's backups are due at their times."""

import time
from dataclasses import replace

import pytest
from tests.control.backup.conftest import Cluster

from raytide.control.backup import __main__ as process
from raytide.control.backup.place import BackupPlace
from raytide.control.backup.repository import BackupSummary, Repository, RepositorySnapshot
from raytide.control.backup.results import BackupResults, LastRun, read_results, record_backup
from raytide.control.backup.upkeep import due_tasks
from raytide.core.errors import StorageError
from raytide.core.objects.cluster_config import BackupSection

SETTINGS = BackupSection(repository="/r", password_file="/p", every_s=900, drill_every_s=86_400)
COLD = SETTINGS.model_copy(update={"cold_repository": "s3:cold"})
DAY = 86_400.0
SUMMARY = BackupSummary("snapshot-1", 1, 1, 1)


def test_the_first_backup_is_due_at_once_and_the_first_drill_one_period_after_it() -> None:
    assert due_tasks(SETTINGS, BackupResults(), DAY)[0] == ("backup",)
    assert due_tasks(SETTINGS, BackupResults(), 5 * DAY)[0] == ("backup",), "there is nothing yet to remove or restore"
    since = BackupResults(backup=LastRun(at_s=2 * DAY - 1.0), first_at_s=DAY)
    assert due_tasks(SETTINGS, since, 2 * DAY - 1.0) == ((), 1.0)
    assert due_tasks(SETTINGS, since, 2 * DAY)[0] == ("forget", "drill")


def test_the_time_of_the_first_backup_is_kept(cluster: Cluster) -> None:
    for at_s in (DAY, 2 * DAY):
        record_backup(cluster.place, at_s, SUMMARY, 1.0)
    results = read_results(cluster.place.work_dir)
    assert (results.first_at_s, results.backup.at_s) == (DAY, 2 * DAY)


def test_a_backup_is_copied_to_the_cold_repository_after_it_was_made() -> None:
    assert due_tasks(COLD, BackupResults(first_at_s=DAY), 5 * DAY)[0] == ("backup", "cold", "forget", "drill")


def test_nothing_is_due_until_the_period_is_over() -> None:
    done = BackupResults(backup=LastRun(at_s=1000.0))
    assert due_tasks(SETTINGS, done, 1500.0) == ((), 400.0)
    assert due_tasks(SETTINGS, done, 1900.0)[0] == ("backup",)


def test_a_failed_task_is_tried_again_within_five_minutes() -> None:
    failed = BackupResults(
        backup=LastRun(at_s=1000.0), drill=LastRun(at_s=1000.0, failed_at_s=1000.0 + DAY, error="no network")
    )
    assert "drill" not in due_tasks(SETTINGS, failed, DAY + 1299.0)[0]
    assert "drill" in due_tasks(SETTINGS, failed, DAY + 1300.0)[0]


@pytest.mark.parametrize(("away", "failed"), [("hot", ["backup", "cold"]), ("cold", ["cold"])])
def test_a_repository_that_is_away_fails_its_own_tasks_which_are_tried_again_later(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, away: str, failed: list[str]
) -> None:
    now_s = time.time()
    place = replace(cluster.place, settings=COLD.model_copy(update={"repository": "hot", "cold_repository": "cold"}))

    def reach(repository: Repository, *_: object, **__: object) -> bool:
        if repository.url == away:
            raise StorageError(f"{away} is away.")
        return False

    def snapshots(repository: Repository, name: str) -> tuple[RepositorySnapshot, ...]:
        reach(repository)
        return (RepositorySnapshot("snapshot-1", now_s, name, ()),)

    def back_up(place: BackupPlace) -> None:
        record_backup(place, now_s, SUMMARY, 1.0)

    monkeypatch.setattr(Repository, "init", reach)
    monkeypatch.setattr(Repository, "snapshots", snapshots)
    monkeypatch.setattr(Repository, "copy_from", reach)
    monkeypatch.setattr(process, "_TASKS", {**process._TASKS, "backup": back_up})
    wait_s = process.run_due(place, now_s)
    results = read_results(place.work_dir)
    assert [task for task in ("backup", "cold") if getattr(results, task).error == f"{away} is away."] == failed
    assert (results.backup.at_s == now_s) is (away == "cold")
    assert wait_s > 60.0


def test_a_clock_that_was_set_back_stops_no_backups() -> None:
    ahead = BackupResults(backup=LastRun(at_s=100 * DAY), drill=LastRun(at_s=100 * DAY), first_at_s=100 * DAY)
    assert due_tasks(SETTINGS, ahead, 5 * DAY)[0] == ("backup", "forget", "drill")
    failed = BackupResults(backup=LastRun(at_s=DAY, failed_at_s=100 * DAY, error="no network"), first_at_s=DAY)
    assert "backup" in due_tasks(SETTINGS, failed, 5 * DAY)[0]
