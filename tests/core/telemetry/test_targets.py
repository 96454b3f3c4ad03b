from __future__ import annotations

from pathlib import Path

from raytide.core.telemetry.targets import Target, announce, announced, discovery


def test_announced_pages_are_listed_by_process_and_a_restart_replaces_its_own(tmp_path: Path) -> None:
    assert announced(tmp_path) == []
    announce(tmp_path, "gateway-1", Target("raytide-gateway", "127.0.2.1:2"))
    announce(tmp_path, "gateway-0", Target("raytide-gateway", "127.0.2.1:1", labels={"node": "head"}))
    announce(tmp_path, "gateway-1", Target("raytide-gateway", "127.0.2.1:3"))
    assert announced(tmp_path) == [
        Target("raytide-gateway", "127.0.2.1:1", labels={"node": "head"}),
        Target("raytide-gateway", "127.0.2.1:3"),
    ]


def test_a_target_is_written_as_prometheus_reads_it() -> None:
    found = discovery([Target("raytide-gpu", "10.0.0.7:9400", "/gpu", {"node": "n1"})])
    labels = {"job": "raytide-gpu", "__metrics_path__": "/gpu", "node": "n1"}
    assert found == [{"targets": ["10.0.0.7:9400"], "labels": labels}]
    assert Target("raytide-api", "h:1").url == "http://h:1/metrics"
