"""Metrics of the control plane itself."""

from typing import Final

from raytide.core.telemetry.metrics import Metric

_LAYER: Final = "infrastructure"

TICKS = Metric("raytide_controller_ticks", "counter", "Ticks of the controller", _LAYER)
TICK_SECONDS = Metric("raytide_controller_tick_seconds", "gauge", "Duration of the last tick", _LAYER, "seconds")
QUARANTINED = Metric(
    "raytide_quarantined", "gauge", "Records excluded from decisions after an error, by kind", _LAYER, labels=("kind",)
)
ERRORS = Metric("raytide_controller_errors", "counter", "Failed calls to Ray or to the provider", _LAYER)
TROUBLE = Metric(
    "raytide_trouble",
    "gauge",
    "1 while the disk is full, the store refuses writes, or the controller is stalled",
    _LAYER,
    labels=("what",),
)
BACKUP_OVERDUE = Metric(
    "raytide_backup_overdue_ratio",
    "gauge",
    "Time since the last successful task of the backup, in periods of that task",
    _LAYER,
    "ratio",
    ("task",),
)
BACKUP_FAILING = Metric(
    "raytide_backup_failing", "gauge", "1 if the last try of the task failed", _LAYER, labels=("task",)
)
BACKUP_AGE = Metric(
    "raytide_backup_age_seconds",
    "gauge",
    "Age of the newest backup: the changes that a loss of the head would cost now",
    _LAYER,
    "seconds",
)
BACKUP_ADDED = Metric("raytide_backup_added_bytes", "gauge", "New data of the last backup", _LAYER, "bytes")
BACKUP_RESTORE = Metric(
    "raytide_backup_restore_seconds",
    "gauge",
    "Time until a control plane answered in the last drill (RTO); 0 if none did",
    _LAYER,
    "seconds",
)
BACKUP_LOST = Metric(
    "raytide_backup_lost_seconds", "gauge", "Age of the backup that the last drill restored (RPO)", _LAYER, "seconds"
)
BACKUP_PROBLEMS = Metric("raytide_backup_drill_problems", "gauge", "Problems that the last drill found", _LAYER)
