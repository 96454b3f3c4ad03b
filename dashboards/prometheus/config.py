"""The configuration of Prometheus and Alertmanager beside a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from raytide.control.bootstrap.cluster_record import RunningCluster
from raytide.core.telemetry.settings import MonitoringSection

_NOBODY = "nobody"
_DEAD_MANS_SWITCH = "AlertmanagerE2eDeadMansSwitch"
_GROUPED_BY = ["alertname", "endpoint", "replica", "node", "gpu", "job", "team", "subject"]
_MOST_ALERTS = 1000
"""The most alerts in one message to the API."""


def rules_dir(cluster: RunningCluster) -> Path:
    return cluster.monitoring_dir / "rules"


def prometheus_config(cluster: RunningCluster, settings: MonitoringSection) -> str:
    """Returns the content of prometheus.yml. It sets `honor_labels`, because raytide's metrics use `job` for training
    jobs.
    """
    scrape_s = max(1, round(settings.scrape_s))
    interval = f"{scrape_s}s"
    own = {cluster.prometheus_url: "prometheus", cluster.alertmanager_url: "alertmanager"}
    return _yaml(
        {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": f"{min(10, scrape_s)}s",
                "evaluation_interval": interval,
                "external_labels": {"cluster": cluster.name},
            },
            "rule_files": [f"{rules_dir(cluster)}/*.yml"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [_address(cluster.alertmanager_url)]}]}]},
            "scrape_configs": [
                {
                    "job_name": "raytide",
                    "honor_labels": True,
                    "http_sd_configs": [{"url": f"{cluster.api_url}/v1/targets", "refresh_interval": interval}],
                },
                *({"job_name": job, "static_configs": [{"targets": [_address(url)]}]} for url, job in own.items()),
            ],
        }
    )


def alertmanager_config(cluster: RunningCluster) -> str:
    """Returns the content of alertmanager.yml. Alertmanager sends alerts to the API, which runs actions and sends
    messages.
    """
    webhook = {
        "url": f"{cluster.api_url}/v1/alerts/webhook",
        "send_resolved": True,
        "max_alerts": _MOST_ALERTS,
        "http_config": {"authorization": {"credentials_file": str(cluster.alertmanager_token_file)}},
    }
    return _yaml(
        {
            "route": {
                "receiver": "raytide",
                "group_by": _GROUPED_BY,
                "group_wait": "1s",
                "group_interval": "15s",
                "repeat_interval": "1h",
                "routes": [{"matchers": [f'alertname="{_DEAD_MANS_SWITCH}"'], "receiver": _NOBODY}],
            },
            "receivers": [{"name": "raytide", "webhook_configs": [webhook]}, {"name": _NOBODY}],
        }
    )


def _address(url: str) -> str:
    return url.removeprefix("http://")


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False)
