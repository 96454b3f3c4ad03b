"""The configuration that Prometheus and Alertmanager get: accepted by both, with a cluster's own bounds, no secrets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from tests.dashboards.prometheus_fixture import needs_prometheus

from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.errors import ConfigError
from raytide.core.telemetry.settings import AlertOverride, MonitoringSection
from raytide.dashboards.prometheus.__main__ import prepare_alertmanager, prepare_prometheus
from raytide.dashboards.prometheus.config import rules_dir
from raytide.dashboards.prometheus.programs import Program, find_program

SETTINGS = MonitoringSection(scrape_s=5, history_days=1.5, history_mb=64)


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    return LocalCluster(
        name="local",
        cluster_id="local-1",
        run_dir=tmp_path,
        gcs_address="127.0.9.1:6388",
        dashboard_url="",
        api_url="http://127.0.9.1:7400",
        serve_url="",
        state_url="",
        config_path=tmp_path / "cluster.yaml",
        created_at_s=0.0,
        version="",
        k=9,
        temp_dir=tmp_path,
    )


def run(program: Program, *arguments: str) -> None:
    path = find_program(program)
    assert path is not None
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_both_accept_their_files(cluster: LocalCluster) -> None:
    cluster.alertmanager_token_file.write_text("secret")
    prepare_prometheus(cluster, SETTINGS)
    prepare_alertmanager(cluster)
    run("promtool", "check", "config", str(cluster.monitoring_dir / "prometheus.yml"))
    run("amtool", "check-config", str(cluster.monitoring_dir / "alertmanager.yml"))


def test_what_is_kept_is_bounded_in_time_and_size(cluster: LocalCluster) -> None:
    arguments = prepare_prometheus(cluster, SETTINGS)
    assert "--storage.tsdb.retention.time=36h" in arguments
    assert "--storage.tsdb.retention.size=64MB" in arguments
    assert "--web.listen-address=127.0.9.1:7490" in arguments


def test_a_cluster_s_own_bounds_are_in_its_rules(cluster: LocalCluster) -> None:
    overrides = {
        "KvCacheNearlyFull": AlertOverride(bound=0.5, for_s=120),
        "PreemptionsHigh": AlertOverride(off=True),
        "ReplicaUnreachable": AlertOverride(for_s=0),
    }
    prepare_prometheus(cluster, MonitoringSection(alerts=overrides))
    rules = {
        rule.get("alert"): rule
        for file in rules_dir(cluster).glob("*.yml")
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    }
    assert rules["KvCacheNearlyFull"]["expr"] == "max by (endpoint, replica) (raytide_kv_use_ratio) > 0.5"
    assert rules["KvCacheNearlyFull"]["for"] == "2m"
    assert "for" not in rules["ReplicaUnreachable"]
    assert "PreemptionsHigh" not in rules


def test_an_alert_that_does_not_exist_is_named(cluster: LocalCluster) -> None:
    settings = MonitoringSection(alerts={"KvCacheNearlyful": AlertOverride(off=True)})
    with pytest.raises(ConfigError, match=r"there is no alert KvCacheNearlyful .did you mean KvCacheNearlyFull"):
        prepare_prometheus(cluster, settings)


def test_alertmanager_s_token_is_in_its_own_file_only(cluster: LocalCluster) -> None:
    cluster.alertmanager_token_file.write_text("the-token")
    arguments = [*prepare_prometheus(cluster, SETTINGS), *prepare_alertmanager(cluster)]
    written = [path.read_text() for path in cluster.monitoring_dir.rglob("*") if path.is_file()]
    assert not any("the-token" in text for text in [*arguments, *written])
    (receiver, nobody) = yaml.safe_load((cluster.monitoring_dir / "alertmanager.yml").read_text())["receivers"]
    assert receiver["webhook_configs"][0]["url"] == "http://127.0.9.1:7400/v1/alerts/webhook"
    assert nobody == {"name": "nobody"}
