"""A cluster with `--monitoring`: a real Prometheus finds and reads its pages, a real Alertmanager hands on its alerts.

It is a cluster of its own, because the session's has no Prometheus.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from tests.cluster_fixture import replica_pids
from tests.dashboards.prometheus_fixture import Prometheus, is_ready, needs_prometheus, without_variables

import raytide as rt
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.specs.train import TrainSpec
from raytide.dashboards.grafana.boards import BOARDS
from raytide.dashboards.grafana.panels import Board, Panel
from raytide.dashboards.prometheus.programs import find_program

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.client,
    needs_prometheus,
    pytest.mark.skipif(find_program("alertmanager") is None, reason="Alertmanager is not installed"),
]

NAME = "watched"
SETTINGS = {
    "scrape_s": 1,
    "alerts": {"ReplicaUnreachable": {"for_s": 2}},
    "probes": [{"endpoint": "chat", "prompt": "x", "every_s": 5}],
}
REPORTS = """
import time

import raytide as rt

while True:
    rt.report(accuracy=0.9)
    time.sleep(1.0)
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("home")
    config = yaml.safe_load(local.DEFAULT_CONFIG.read_text())
    config["metadata"]["raytide"]["monitoring"] = SETTINGS
    (home / "cluster.yaml").write_text(yaml.safe_dump(config))
    with local.temporary(home, home / "cluster.yaml", NAME, monitoring=True) as started:
        yield started


@pytest.fixture(scope="module")
def prometheus(watched: LocalCluster) -> Iterator[Prometheus]:
    deadline = time.monotonic() + 240  # it starts beside the API, for which `watched` has waited
    while not is_ready(watched.prometheus_url):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with Prometheus(watched.prometheus_url) as found:
        yield found


@pytest.fixture(scope="module")
def client(watched: LocalCluster) -> Iterator[rt.Client]:
    with rt.Client(ApiClient.from_run_dir(watched.run_dir)) as connected:
        yield connected


@pytest.fixture
def training(client: rt.Client, train_spec: Callable[..., TrainSpec]) -> Iterator[rt.TrainRun]:
    """A training that goes on until the test ends. Nobody knows the peak of this machine's CPUs, so it is stated."""
    run = client.train(train_spec(steps=100_000, checkpoint_every=20, export=False, peak_tflops=0.05))
    yield run
    run.stop()


@pytest.fixture
def scripts(client: rt.Client, tmp_path: Path) -> Iterator[None]:
    """A script that reports a value of its own, and one that waits for all nodes with GPUs, of which the endpoint has
    one.
    """
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "reports.py").write_text(REPORTS)
    runs = [
        client.run("reports.py", working_dir=folder, **more)
        for more in ({"cpus": 1}, {"cpus": 0, "gpus": 8, "nodes": 3})
    ]
    yield
    for run in runs:
        run.stop()


@pytest.fixture(scope="module")
def endpoint(client: rt.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rt.EndpointHandle]:
    """An endpoint of a fake engine that answers requests all the time."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    spec = ServeSpec(
        name="chat",
        model=str(folder),
        replicas=Replicas(min=1, max=1, slo_ttft_s=30.0),
        resources={"GPU": 8},
        engine={"kind": "fake", "tokens_per_s": 200.0},
    )
    handle = client.serve(spec)
    handle.wait(replicas=1, timeout_s=360.0)
    with loaded(handle):
        yield handle
    handle.delete()


@contextmanager
def loaded(handle: rt.EndpointHandle) -> Iterator[None]:
    """Sends requests, one after the other, until the block ends."""
    done = threading.Event()
    client = handle.openai(max_retries=0, timeout=20.0)

    def ask() -> None:
        while not done.wait(0.1):
            with suppress(Exception):  # a replica hangs in one test
                client.completions.create(model="chat", prompt="x", max_tokens=8)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join(30)


def test_every_page_is_found_and_every_rule_is_evaluated(
    prometheus: Prometheus, endpoint: rt.EndpointHandle, eventually: Callable[..., None]
) -> None:
    jobs = {"raytide-api", "raytide-gateway", "raytide-replica", "raytide-node", "raytide-gpu", "prometheus"}

    def healthy() -> set[str]:
        targets = prometheus.get("targets")["activeTargets"]
        return {each["labels"]["job"] for each in targets if each["health"] == "up"}

    eventually(lambda: jobs <= healthy())

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    eventually(lambda: len(found := rules()) > 60 and all(rule["health"] == "ok" for rule in found))


def test_status_says_where_they_are(watched: LocalCluster) -> None:
    now = ApiClient.from_run_dir(watched.run_dir).status()
    assert (now.prometheus, now.alertmanager) == (watched.prometheus_url, watched.alertmanager_url)


def test_a_hung_replica_raises_its_alert_in_prometheus_alertmanager_and_the_api(
    watched: LocalCluster,
    prometheus: Prometheus,
    endpoint: rt.EndpointHandle,
    eventually: Callable[..., None],
    record_property: Callable[[str, object], None],
) -> None:
    up = 'up{job="raytide-replica", endpoint="chat"}'
    eventually(lambda: list(prometheus.query(up, time.time()).values()) == [1.0])
    token = json.loads(watched.client_file.read_text())["token"]

    def at_prometheus() -> set[str]:
        return {each["labels"]["alertname"] for each in prometheus.get("alerts")["alerts"] if each["state"] == "firing"}

    def at_alertmanager() -> set[str]:
        found = httpx.get(f"{watched.alertmanager_url}/api/v2/alerts", timeout=60.0).raise_for_status().json()
        return {each["labels"]["alertname"] for each in found}

    def at_the_api() -> dict[str, str]:
        headers = {"Authorization": f"Bearer {token}"}
        found = httpx.get(f"{watched.api_url}/v1/alerts", headers=headers, timeout=60.0).raise_for_status().json()
        return {each["name"]: each["state"] for each in found}

    frozen = processes_of_replicas(watched)
    began_s = time.monotonic()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: "ReplicaUnreachable" in at_prometheus(), within_s=60.0)
        fired_s = time.monotonic() - began_s
        eventually(lambda: "ReplicaUnreachable" in at_alertmanager(), within_s=60.0)
        eventually(lambda: at_the_api().get("ReplicaUnreachable") == "firing", within_s=60.0)
        record_property("fired_s", fired_s)
        record_property("at_the_api_s", time.monotonic() - began_s)
    finally:
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    eventually(lambda: "ReplicaUnreachable" not in at_prometheus(), within_s=90.0)


def processes_of_replicas(of: LocalCluster) -> list[int]:
    """Returns the replicas' processes and those of their engines."""
    found = [psutil.Process(pid) for pid in replica_pids(of)]
    return [process.pid for replica in found for process in (replica, *replica.children(recursive=True))]


def panels() -> Iterator[tuple[Board, Panel]]:
    return ((board, panel) for board in BOARDS for panel in board.panels)


@pytest.mark.usefixtures("endpoint", "training", "scripts")
def test_no_panel_is_empty(watched: LocalCluster, prometheus: Prometheus) -> None:
    ApiClient.from_run_dir(watched.run_dir).change_team("default", budget={"hard_usd": 100.0})

    def is_empty(promql: str) -> bool:
        """Returns whether this query gave nothing in the last ten minutes, which what it once gave is in."""
        now_s = time.time()
        return not prometheus.get("query_range", query=promql, start=now_s - 600, end=now_s, step=5)["result"]

    left = {
        f"{board.uid} / {panel.title}: {(promql := without_variables(query.promql(board.variables), '20s'))}": promql
        for board, panel in panels()
        for query in panel.queries
    }
    deadline = time.monotonic() + 360
    while left := {where: promql for where, promql in left.items() if is_empty(promql)}:
        assert time.monotonic() < deadline, "\n".join(sorted(left))
        time.sleep(1)
