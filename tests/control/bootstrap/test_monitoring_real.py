"""A cluster's Prometheus ends with it, its measurements go on in the next cluster of that name, and its alerts act."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from tests.cluster_fixture import replica_pids
from tests.dashboards.prometheus_fixture import Prometheus, is_ready, needs_prometheus

import raytide as rt
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import MARK
from raytide.control.client import ApiClient
from raytide.core.io.process import marked
from raytide.core.objects.endpoint import ServeSpec

pytestmark = [pytest.mark.cluster, pytest.mark.client, needs_prometheus]

CHILDREN = {"controller": "standin_child", "api": "standin_api"}
OWN = 'up{job="prometheus"}'
ALERT = "ReplicaUnreachable"


@pytest.mark.soak
def test_measurements_outlive_down_and_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    standins = str(Path(__file__).parents[1] / "standins")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([standins, str(Path(__file__).parents[3] / "platform")]))
    with local.temporary(tmp_path, children=CHILDREN, monitoring=True) as first:
        with Prometheus(first.prometheus_url) as prometheus:
            eventually(lambda: is_ready(prometheus.url) and prometheus.query(OWN, time.time()))
            measured_s = time.time()
        assert first.alertmanager_token_file.stat().st_mode & 0o777 == 0o600
    assert marked(MARK, first.cluster_id) == []
    assert not first.alertmanager_token_file.exists()
    with local.temporary(tmp_path, children=CHILDREN, monitoring=True) as second:
        assert second.cluster_id != first.cluster_id
        with Prometheus(second.prometheus_url) as prometheus:
            eventually(lambda: is_ready(prometheus.url))
            assert list(prometheus.query(OWN, measured_s).values()) == [1.0]
    with local.temporary(tmp_path, children=CHILDREN) as third:
        assert not third.monitoring and not third.is_alive("prometheus")
        assert not third.alertmanager_token_file.exists()


@pytest.mark.soak  # tests/live/test_monitoring.py restarts one by its alert too
def test_a_hung_replica_reaches_alertmanager_by_prometheus_and_is_replaced(
    tmp_path: Path, eventually: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    file = yaml.safe_load(local.DEFAULT_CONFIG.read_text())
    file["metadata"]["raytide"]["monitoring"] = {
        "scrape_s": 1,
        "alerts": {ALERT: {"for_s": 3}},
        "actions": [{"alert": ALERT, "do": "restart_replica"}],
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(file))
    (tmp_path / "config.json").write_text("{}")
    spec = ServeSpec(name="hangs", model=str(tmp_path), resources={"CPU": 1}, engine={"kind": "fake"})
    with local.temporary(tmp_path / "home", tmp_path / "cluster.yaml", monitoring=True) as cluster:
        tide = rt.Client(ApiClient.from_run_dir(cluster.run_dir))
        endpoint = tide.serve(spec).wait(timeout_s=360.0)
        (replica,) = replica_pids(cluster)
        (engine,) = (
            p for p in psutil.Process(replica).children(recursive=True) if "engine_process" in str(p.cmdline())
        )
        with Prometheus(cluster.prometheus_url) as prometheus:
            seen = 'up{job="raytide-replica",endpoint="hangs"} == 1'
            eventually(lambda: is_ready(prometheus.url) and prometheus.query(seen, time.time()))
            engine.suspend()
            hung_s = time.time()
            eventually(lambda: "firing" in [a["state"] for a in prometheus.get("alerts")["alerts"] if is_it(a)])
            fired_s = time.time()
        alerts = f"{cluster.alertmanager_url}/api/v2/alerts"
        eventually(lambda: any(is_it(each) for each in httpx.get(alerts, timeout=10).json()))
        eventually(lambda: not engine.is_running(), within_s=120)
        endpoint.wait(timeout_s=360.0)
        assert endpoint.openai().completions.create(model="hangs", prompt="a", max_tokens=2).choices[0].text
        healed_s = time.time()
        (done,) = [each for each in tide.client.call("GET", "/v1/alerts/actions") if each["alert"] == ALERT]
        assert (done["kind"], done["state"]) == ("restart_replica", "done")
    with capsys.disabled():
        sys.stdout.write(f"\nfiring after {fired_s - hung_s:.1f} s, healed after {healed_s - hung_s:.1f} s\n")


def is_it(alert: dict[str, Any]) -> bool:
    return str(alert["labels"]["alertname"]) == ALERT
