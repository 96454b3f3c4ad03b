"""The configuration of Prometheus and Alertmanager beside a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_NOBODY = "nobody"
_DEAD_MANS_SWITCH = "AlertmanagerE2eDeadMansSwitch"
_GROUPED_BY = ["alertname", "endpoint", "replica", "node", "gpu", "job", "team", "subject"]
_MOST_ALERTS = 1000
"""The most alerts in one message to the API."""


@dataclass(frozen=True, slots=True)
class MonitoringPlan:
    """The addresses and paths of a cluster that its Prometheus and Alertmanager need."""

    cluster: str
    folder: Path
    """Their files and data, in the run folder."""
    api_url: str
    prometheus_url: str
    alertmanager_url: str
    token_file: Path
    """The API's token for Alertmanager, which opens its webhook and nothing else."""
    scrape_s: int
    history_days: float
    history_mb: int

    @property
    def rules(self) -> Path:
        return self.folder / "rules"


def prometheus_config(plan: MonitoringPlan) -> str:
    """Returns prometheus.yml. Labels of the pages win over those of the targets, because `job` is a training job
    there."""
    interval = f"{plan.scrape_s}s"
    own = {plan.prometheus_url: "prometheus", plan.alertmanager_url: "alertmanager"}
    return _yaml(
        {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": f"{min(10, plan.scrape_s)}s",
                "evaluation_interval": interval,
                "external_labels": {"cluster": plan.cluster},
            },
            "rule_files": [f"{plan.rules}/*.yml"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [_address(plan.alertmanager_url)]}]}]},
            "scrape_configs": [
                {
                    "job_name": "raytide",
                    "honor_labels": True,
                    "http_sd_configs": [{"url": f"{plan.api_url}/v1/targets", "refresh_interval": interval}],
                },
                *({"job_name": job, "static_configs": [{"targets": [_address(url)]}]} for url, job in own.items()),
            ],
        }
    )


def alertmanager_config(plan: MonitoringPlan) -> str:
    """Returns alertmanager.yml: alerts go to the API's webhook, which acts and notifies."""
    webhook = {
        "url": f"{plan.api_url}/v1/alerts/webhook",
        "send_resolved": True,
        "max_alerts": _MOST_ALERTS,
        "http_config": {"authorization": {"credentials_file": str(plan.token_file)}},
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
