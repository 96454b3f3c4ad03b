"""A real Prometheus over samples of a test's own."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from raytide.core.io.process import free_port
from raytide.dashboards.prometheus.programs import find_program
from raytide.dashboards.rules.evaluation import Labels, Vector

needs_prometheus = pytest.mark.skipif(
    find_program("prometheus") is None or find_program("promtool") is None,
    reason="Prometheus is not installed, and ./dev setup cannot fetch it here",
)
Stored = Mapping[str, Mapping[Labels, Sequence[tuple[float, float]]]]
"""Points by exposed name and labels."""


def open_metrics(stored: Stored) -> str:
    lines = []
    for name, series in stored.items():
        for labels, points in series.items():
            selector = ",".join(f"{label}={json.dumps(value)}" for label, value in labels)
            lines += [f"{name}{{{selector}}} {value!r} {at_s:.3f}" for at_s, value in points]
    return "\n".join([*lines, "# EOF\n"])


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=f"{url}/api/v1/", timeout=60.0)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def get(self, path: str, **parameters: str | float) -> Any:
        answer = self._client.get(path, params=parameters)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def query(self, promql: str, at_s: float) -> Vector:
        result = self.get("query", query=promql, time=f"{at_s:.3f}")["result"]
        return {labels_of(each["metric"]): float(each["value"][1]) for each in result}


def labels_of(metric: Mapping[str, str]) -> Labels:
    return tuple(sorted((name, value) for name, value in metric.items() if name != "__name__"))


@contextmanager
def running_prometheus(folder: Path, config: str, *options: str) -> Iterator[Prometheus]:
    """Runs Prometheus over a folder until the block ends."""
    (folder / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    program = find_program("prometheus")
    assert program is not None
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={address}", *options],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not is_ready(f"http://{address}"):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "prometheus.log").read_text()
            time.sleep(0.05)
        with Prometheus(f"http://{address}") as prometheus:
            yield prometheus
    finally:
        process.terminate()
        process.wait(120)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=30.0).is_success
    except httpx.HTTPError:
        return False


@contextmanager
def prometheus_over(folder: Path, stored: Stored) -> Iterator[Prometheus]:
    """Runs Prometheus over samples that it did not scrape."""
    (folder / "samples").write_text(open_metrics(stored))
    program = find_program("promtool")
    assert program is not None
    command = [program, "tsdb", "create-blocks-from", "openmetrics", f"{folder}/samples", f"{folder}/data"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with running_prometheus(folder, "{}", "--storage.tsdb.retention.time=100y") as prometheus:
        yield prometheus


def without_variables(query: str, window: str = "1m") -> str:
    """Returns a panel's query as Grafana sends it when everything is selected."""
    return re.sub(r"\$(endpoint|job|node|team)\b", ".*", query.replace("$__rate_interval", window))
