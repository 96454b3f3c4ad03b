"""Runs Prometheus or Alertmanager for a cluster: `python -m raytide.dashboards.prometheus RUN_DIR PROGRAM`.

This process writes the program's files and then becomes the program by exec. The supervisor thus watches the program
itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from raytide.control.bootstrap.cluster_record import RunningCluster, load
from raytide.core.errors import ConfigError, NotFoundError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.telemetry.settings import MonitoringSection
from raytide.dashboards.prometheus.config import alertmanager_config, prometheus_config, rules_dir
from raytide.dashboards.prometheus.programs import HOW_TO_INSTALL, Program, find_program
from raytide.dashboards.rules.overrides import adjusted_groups
from raytide.dashboards.rules.rule_files import write_rule_files

_RESEND = "15s"
"""The time after which Prometheus sends an alert again; the first one may come before Alertmanager runs."""


def prepare_prometheus(cluster: RunningCluster, settings: MonitoringSection) -> list[str]:
    """Writes Prometheus' files and returns its command-line arguments."""
    groups = adjusted_groups(settings.alerts)
    folder = cluster.monitoring_dir
    folder.mkdir(mode=0o700, exist_ok=True)
    write_rule_files(rules_dir(cluster), groups)
    config = folder / "prometheus.yml"
    config.write_text(prometheus_config(cluster, settings))
    return [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder}/prometheus",
        f"--storage.tsdb.retention.time={round(settings.history_days * 24)}h",
        "--enable-feature=exemplar-storage",
        f"--storage.tsdb.retention.size={settings.history_mb}MB",
        f"--web.listen-address={cluster.prometheus_url.removeprefix('http://')}",
        f"--web.external-url={cluster.prometheus_url}",
        f"--rules.alert.resend-delay={_RESEND}",
    ]


def prepare_alertmanager(cluster: RunningCluster) -> list[str]:
    """Writes Alertmanager's configuration file and returns its command-line arguments."""
    folder = cluster.monitoring_dir
    folder.mkdir(mode=0o700, exist_ok=True)
    config = folder / "alertmanager.yml"
    config.write_text(alertmanager_config(cluster))
    return [
        f"--config.file={config}",
        f"--storage.path={folder}/alertmanager",
        f"--web.listen-address={cluster.alertmanager_url.removeprefix('http://')}",
        f"--web.external-url={cluster.alertmanager_url}",
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
    arguments = prepare_prometheus(cluster, settings) if program == "prometheus" else prepare_alertmanager(cluster)
    os.execv(path, [path, *arguments])  # a path of an installed program  # nosec B606


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])  # type: ignore[arg-type]
