"""Metrics of the control plane itself."""

from raytide.core.telemetry.metrics import counter, gauge

TICKS = counter("raytide_controller_ticks", "Ticks of the controller")
TICK_SECONDS = gauge("raytide_controller_tick_seconds", "Duration of the last tick")
QUARANTINED = gauge("raytide_quarantined", "Records excluded from decisions after an error, by kind", "kind")
ERRORS = counter("raytide_controller_errors", "Failed calls to Ray or to the provider")
TROUBLE = gauge(
    "raytide_trouble", "1 while the disk is full, the store refuses writes, or the controller is stalled", "what"
)
AUDIT_MISSING = gauge(
    "raytide_audit_missing_entries", "Entries of the audit log that are missing between its first and its last number"
)
BACKUP_OVERDUE = gauge(
    "raytide_backup_overdue_ratio", "Time since the last successful task of the backup, in periods of that task", "task"
)
BACKUP_FAILING = gauge("raytide_backup_failing", "1 if the last try of the task failed", "task")
BACKUP_AGE = gauge(
    "raytide_backup_age_seconds", "Age of the newest backup: the changes that a loss of the head would cost now"
)
BACKUP_ADDED = gauge("raytide_backup_added_bytes", "New data of the last backup")
BACKUP_RESTORE = gauge(
    "raytide_backup_restore_seconds", "Time until a control plane answered fully in the last drill (RTO); 0 if none did"
)
BACKUP_LOST = gauge("raytide_backup_lost_seconds", "Age of the backup that the last drill restored (RPO)")
BACKUP_PROBLEMS = gauge("raytide_backup_drill_problems", "Problems that the last drill found")
