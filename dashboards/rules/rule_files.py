"""Writes the alert and recording rules as rule files for Prometheus.

`python -m raytide.dashboards.rules.rule_files` updates the rule files in the repository.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.alerts import GROUPS, PROMETHEUS_ALERTS
from raytide.dashboards.rules.expressions import duration, to_promql
from raytide.dashboards.rules.recordings import RECORDINGS

FOLDER = Path(__file__).parent / "generated"
_WIDTH = 1000
_HEADER = "# Generated from raytide.dashboards.rules by `python -m raytide.dashboards.rules.rule_files`.\n"


def rule_files(groups: Mapping[str, Iterable[AlertRule]] = GROUPS) -> dict[str, str]:
    """Returns the contents of the rule files by file name."""
    recordings: list[dict[str, object]] = [
        {"record": each.name, "expr": to_promql(each.expression)} for each in RECORDINGS
    ]
    files = {"recordings.yml": _file("raytide-recordings", recordings)}
    for name, rules in {**groups, "prometheus": PROMETHEUS_ALERTS}.items():
        files[f"{name}.yml"] = _file(f"raytide-{name}", [_alert(rule) for rule in rules])
    return files


def write_rule_files(folder: Path, groups: Mapping[str, Iterable[AlertRule]] = GROUPS) -> list[Path]:
    """Writes the rule files into a folder and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in rule_files(groups).items():
        (folder / name).write_text(content)
    return [folder / name for name in rule_files(groups)]


def _file(group: str, rules: list[dict[str, object]]) -> str:
    return _HEADER + yaml.safe_dump({"groups": [{"name": group, "rules": rules}]}, sort_keys=False, width=_WIDTH)


def _alert(rule: AlertRule) -> dict[str, object]:
    annotations = {"summary": rule.summary_template(), "runbook": rule.runbook}
    return {
        "alert": rule.name,
        "expr": to_promql(rule.expr),
        **({"for": duration(rule.for_s)} if rule.for_s else {}),
        "labels": {"severity": rule.severity, "layer": rule.layer},
        "annotations": annotations | ({"action": rule.action} if rule.action else {}),
    }


if __name__ == "__main__":
    write_rule_files(FOLDER)
