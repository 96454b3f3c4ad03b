"""Alert rules on the control plane and on the monitoring itself."""

from functools import partial

from raytide.core.telemetry.catalogue import control, infrastructure, monitoring
from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.expressions import (
    Absent,
    Condition,
    OverTime,
    Rate,
    Selector,
    SetOperation,
    matching,
    max_by,
    min_by,
    select,
    sum_by,
)

_API = Selector("up", matching(job="raytide-api"))
_application = partial(AlertRule, layer="application")
_infrastructure = partial(AlertRule, layer="infrastructure")
_monitoring = partial(AlertRule, layer="monitoring")

ALERTS = (
    _infrastructure(
        "ApiUnreachable",
        "critical",
        SetOperation(Condition(max_by(_API), "==", 0), "or", Absent(_API)),
        60,
        "The API's metrics cannot be read",
        "The supervisor restarts it: see logs/api.log and logs/supervisor.log in the run folder.",
    ),
    _infrastructure(
        "ControlPlaneTrouble",
        "critical",
        Condition(max_by(select(control.TROUBLE), "what"), ">", 0),
        60,
        "The control plane reports trouble with its {what}",
        "`raytide status` says what it is: a full disk, a store that refuses writes, or a stalled controller.",
    ),
    _infrastructure(
        "ControllerErrorsHigh",
        "warning",
        Condition(sum_by(Rate(select(control.ERRORS), 600)), ">", 0.1),
        600,
        "{value} calls of the controller to Ray or the provider fail each second",
        "logs/controller.log names them: credentials, quotas, or a head under pressure.",
    ),
    _infrastructure(
        "RecordsQuarantined",
        "warning",
        Condition(max_by(select(control.QUARANTINED), "kind"), ">", 0),
        300,
        "{value} records of kind {kind} are left out of decisions after an error",
        "logs/controller.log has the error; `raytide status` names the records.",
    ),
    _infrastructure(
        "RunFolderDiskLow",
        "critical",
        Condition(min_by(select(infrastructure.DISK_FREE)), "<", 2e9),
        300,
        "{value:bytes} bytes are left on the disk of the run folder",
        "Remove old logs and datasets: without space the store refuses writes.",
    ),
    _infrastructure(
        "BackupOverdue",
        "critical",
        Condition(max_by(select(control.BACKUP_OVERDUE), "task"), ">", 3),
        300,
        "The last {task} that succeeded is {value} periods old",
        "logs/backup.log has the error: credentials, a full disk, or a repository that cannot be reached.",
    ),
    _infrastructure(
        "BackupFailing",
        "warning",
        Condition(max_by(select(control.BACKUP_FAILING), "task"), ">", 0),
        900,
        "The last try of the task {task} of the backups failed",
        "logs/backup.log has the error; `raytide backup run` and `raytide backup drill` show it too.",
    ),
    _infrastructure(
        "BackupDrillFailed",
        "critical",
        Condition(max_by(select(control.BACKUP_PROBLEMS)), ">", 0),
        0,
        "The last drill found {value} problems in the backup",
        "`raytide backup drill` names them; docs/runbooks/damaged-repository.md says what to do.",
    ),
    _infrastructure(
        "AuditLogGap",
        "critical",
        Condition(max_by(select(control.AUDIT_MISSING)), ">", 0),
        0,
        "{value} entries of the audit log are missing",
        "Somebody deleted them in the database: `raytide audit verify` shows where; compare with a backup.",
    ),
    _monitoring(
        "CertExpiringSoon",
        "warning",
        Condition(min_by(select(monitoring.CERTIFICATE_LEFT), "address"), "<", 14 * 86400),
        3600,
        "The certificate of {address} expires in {value:seconds}",
        "Renew it, or ask whom it belongs to: calls to this address fail from then on.",
    ),
    _monitoring(
        "PrometheusTargetMissing",
        "warning",
        Condition(min_by(Selector("up"), "job", "instance"), "==", 0),
        300,
        "{instance} of {job} cannot be scraped",
        "Its process hangs or is cut off; a replica that ended disappears by itself.",
    ),
    _monitoring(
        "AlertActionsFailing",
        "warning",
        Condition(sum_by(OverTime("increase", select(monitoring.ACTIONS, outcome="failed"), 3600), "action"), ">", 0),
        0,
        "The action {action} of an alert failed",
        "`raytide alerts` shows its error; do it by hand.",
    ),
    _application(
        "ServingLatencyAnomaly",
        "info",
        Condition(max_by(select(monitoring.ANOMALY_SCORE, signal="latency"), "subject"), ">", 4),
        600,
        "The latency of {subject} is {value} deviations above its usual",
        "Compare its load, its replicas' step times and its last rollout.",
    ),
)

_FAILURES = Selector("prometheus_rule_evaluation_failures_total")

PROMETHEUS_ALERTS = (
    _monitoring(
        "PrometheusRuleEvaluationFailures",
        "warning",
        Condition(sum_by(OverTime("increase", _FAILURES, 600)), ">", 0),
        0,
        "Prometheus could not evaluate rules",
        "Its log and its page of rules name them.",
    ),
    _monitoring(
        "PrometheusTimeseriesCardinality",
        "warning",
        Condition(max_by(Selector("prometheus_tsdb_head_series")), ">", 2e6),
        900,
        "Prometheus holds {value} series",
        "Its page of the TSDB's status shows the labels with the most values.",
    ),
    _monitoring(
        "AlertmanagerE2eDeadMansSwitch",
        "info",
        Condition(sum_by(Selector("up")), ">=", 0),
        0,
        "Alerts arrive: this one always fires",
        "Have something outside the cluster complain when it stops arriving.",
    ),
)
"""Alerts of Prometheus itself, which raytide's own evaluator has no series for."""
