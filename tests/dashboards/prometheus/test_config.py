"""The configuration that Prometheus and Alertmanager get: accepted by both, with a cluster's own bounds, no secrets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from tests.dashboards.prometheus_fixture import needs_prometheus

from raytide.core.errors import ConfigError
from raytide.core.telemetry.settings import AlertOverride, MonitoringSection
from raytide.dashboards.prometheus.__main__ import prepare_alertmanager, prepare_prometheus
from raytide.dashboards.prometheus.config import MonitoringPlan
from raytide.dashboards.prometheus.programs import Program, find_program


@pytest.fixture
def plan(tmp_path: Path) -> MonitoringPlan:
    return MonitoringPlan(
        cluster="local",
        folder=tmp_path / "monitoring",
        api_url="http://127.0.9.1:7400",
        prometheus_url="http://127.0.9.1:7490",
        alertmanager_url="http://127.0.9.1:7493",
        token_file=tmp_path / "alertmanager.token",
        scrape_s=5,
        history_days=1.5,
        history_mb=64,
    )


def run(program: Program, *arguments: str) -> None:
    path = find_program(program)
    assert path is not None
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_both_accept_their_files(plan: MonitoringPlan) -> None:
    plan.token_file.write_text("secret")
    prepare_prometheus(plan, MonitoringSection())
    prepare_alertmanager(plan)
    run("promtool", "check", "config", str(plan.folder / "prometheus.yml"))
    run("amtool", "check-config", str(plan.folder / "alertmanager.yml"))


def test_what_is_kept_is_bounded_in_time_and_size(plan: MonitoringPlan) -> None:
    arguments = prepare_prometheus(plan, MonitoringSection())
    assert "--storage.tsdb.retention.time=36h" in arguments
    assert "--storage.tsdb.retention.size=64MB" in arguments
    assert "--web.listen-address=127.0.9.1:7490" in arguments


def test_a_cluster_s_own_bounds_are_in_its_rules(plan: MonitoringPlan) -> None:
    overrides = {
        "KvCacheNearlyFull": AlertOverride(bound=0.5, for_s=120),
        "PreemptionsHigh": AlertOverride(off=True),
        "ReplicaUnreachable": AlertOverride(for_s=0),
    }
    prepare_prometheus(plan, MonitoringSection(alerts=overrides))
    rules = {
        rule.get("alert"): rule
        for file in plan.rules.glob("*.yml")
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    }
    assert rules["KvCacheNearlyFull"]["expr"] == "max by (endpoint, replica) (raytide_kv_use_ratio) > 0.5"
    assert rules["KvCacheNearlyFull"]["for"] == "2m"
    assert "for" not in rules["ReplicaUnreachable"]
    assert "PreemptionsHigh" not in rules


def test_an_alert_that_does_not_exist_is_named(plan: MonitoringPlan) -> None:
    settings = MonitoringSection(alerts={"KvCacheNearlyful": AlertOverride(off=True)})
    with pytest.raises(ConfigError, match=r"there is no alert KvCacheNearlyful .did you mean KvCacheNearlyFull"):
        prepare_prometheus(plan, settings)


def test_alertmanager_s_token_is_in_its_own_file_only(plan: MonitoringPlan) -> None:
    plan.token_file.write_text("the-token")
    arguments = [*prepare_prometheus(plan, MonitoringSection()), *prepare_alertmanager(plan)]
    written = [path.read_text() for path in plan.folder.rglob("*") if path.is_file()]
    assert not any("the-token" in text for text in [*arguments, *written])
    (receiver, nobody) = yaml.safe_load((plan.folder / "alertmanager.yml").read_text())["receivers"]
    assert receiver["webhook_configs"][0]["url"] == "http://127.0.9.1:7400/v1/alerts/webhook"
    assert nobody == {"name": "nobody"}
