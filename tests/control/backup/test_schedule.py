"""The tasks of a cluster's backups are due at their times."""

from raytide.control.backup.results import BackupResults, LastRun
from raytide.control.backup.upkeep import due_tasks
from raytide.core.objects.cluster_config import BackupSection

SETTINGS = BackupSection(repository="/r", password_file="/p", every_s=900, drill_every_s=86_400)
COLD = SETTINGS.model_copy(update={"cold_repository": "s3:cold"})
DAY = 86_400.0


def test_the_first_backup_is_due_at_once_and_the_first_drill_after_its_period() -> None:
    assert due_tasks(SETTINGS, BackupResults(), DAY, DAY)[0] == ("backup",)
    assert due_tasks(SETTINGS, BackupResults(), DAY, 2 * DAY)[0] == ("backup", "forget", "drill")


def test_a_backup_is_copied_to_the_cold_repository_after_it_was_made() -> None:
    assert due_tasks(COLD, BackupResults(), DAY, 5 * DAY)[0] == ("backup", "cold", "forget", "drill")


def test_nothing_is_due_until_the_period_is_over() -> None:
    done = BackupResults(backup=LastRun(at_s=1000.0))
    assert due_tasks(SETTINGS, done, 1000.0, 1500.0) == ((), 400.0)
    assert due_tasks(SETTINGS, done, 1000.0, 1900.0)[0] == ("backup",)


def test_a_failed_task_is_tried_again_within_five_minutes() -> None:
    failed = BackupResults(
        backup=LastRun(at_s=1000.0), drill=LastRun(at_s=1000.0, failed_at_s=1000.0 + DAY, error="no network")
    )
    assert "drill" not in due_tasks(SETTINGS, failed, 1000.0, DAY + 1299.0)[0]
    assert "drill" in due_tasks(SETTINGS, failed, 1000.0, DAY + 1300.0)[0]
