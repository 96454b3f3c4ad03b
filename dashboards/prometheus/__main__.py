"""Becomes Prometheus or Alertmanager of a cluster: `python -m raytide.dashboards.prometheus RUN_DIR PROGRAM`.

It writes the program's files and then replaces itself with the program, so that the supervisor's child is the program.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from raytide.control.bootstrap.cluster_record import RunningCluster, load
from raytide.core.errors import ConfigError, NotFoundError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.telemetry.settings import MonitoringSection
from raytide.dashboards.prometheus.config import MonitoringPlan, alertmanager_config, prometheus_config
from raytide.dashboards.prometheus.programs import HOW_TO_INSTALL, Program, find_program
from raytide.dashboards.rules.overrides import adjusted_groups
from raytide.dashboards.rules.rule_files import write_rule_files

_RESEND = "15s"
"""The time after which Prometheus sends an alert again; the first one may come before Alertmanager runs."""


def plan_of(cluster: RunningCluster, settings: MonitoringSection) -> MonitoringPlan:
    return MonitoringPlan(
        cluster=cluster.name,
        folder=cluster.monitoring_dir,
        api_url=cluster.api_url,
        prometheus_url=cluster.prometheus_url,
        alertmanager_url=cluster.alertmanager_url,
        token_file=cluster.alertmanager_token_file,
        scrape_s=max(1, round(settings.scrape_s)),
        history_days=settings.history_days,
        history_mb=settings.history_mb,
    )


def prepare_prometheus(plan: MonitoringPlan, settings: MonitoringSection) -> list[str]:
    """Writes Prometheus' files and returns its arguments."""
    groups = adjusted_groups(settings.alerts)
    plan.folder.mkdir(mode=0o700, exist_ok=True)
    write_rule_files(plan.rules, groups)
    config = plan.folder / "prometheus.yml"
    config.write_text(prometheus_config(plan))
    return [
        f"--config.file={config}",
        f"--storage.tsdb.path={plan.folder}/prometheus",
        f"--storage.tsdb.retention.time={round(plan.history_days * 24)}h",
        "--enable-feature=exemplar-storage",
        f"--storage.tsdb.retention.size={plan.history_mb}MB",
        f"--web.listen-address={plan.prometheus_url.removeprefix('http://')}",
        f"--web.external-url={plan.prometheus_url}",
        f"--rules.alert.resend-delay={_RESEND}",
    ]


def prepare_alertmanager(plan: MonitoringPlan) -> list[str]:
    """Writes Alertmanager's file and returns its arguments."""
    plan.folder.mkdir(mode=0o700, exist_ok=True)
    config = plan.folder / "alertmanager.yml"
    config.write_text(alertmanager_config(plan))
    return [
        f"--config.file={config}",
        f"--storage.path={plan.folder}/alertmanager",
        f"--web.listen-address={plan.alertmanager_url.removeprefix('http://')}",
        f"--web.external-url={plan.alertmanager_url}",
        "--cluster.listen-address=",  # it has no peers
    ]


def main(run_dir: str, program: Program) -> None:
    cluster = load(Path(run_dir))
    if cluster is None:
        raise NotFoundError(f"{run_dir} holds no cluster.", hint="Start it: `raytide up --local --monitoring`.")
    path = find_program(program)
    if path is None:
        raise ConfigError(f"{program} is not installed.", hint=HOW_TO_INSTALL)
    settings = load_cluster(cluster.config_path).settings.monitoring
    plan = plan_of(cluster, settings)
    arguments = prepare_prometheus(plan, settings) if program == "prometheus" else prepare_alertmanager(plan)
    os.execv(path, [path, *arguments])  # a path of an installed program  # nosec B606


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])  # type: ignore[arg-type]
