"""The fake GPU exporter of local nodes: a page over HTTP that the scraper reads as if it were Ray's agent's."""

from __future__ import annotations

from pathlib import Path

import httpx

from raytide.autoscaler.nodes.utilization import parse_page
from raytide.autoscaler.providers.local.files import LocalMachine, NodeFolder
from raytide.autoscaler.providers.local.meter import set_use, start_meter
from raytide.core.objects.node import Signal


def test_it_says_what_it_was_told_for_each_gpu_and_is_silent_when_told_so(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "nodes" / "node-1")
    folder.path.mkdir(parents=True)
    purchase = LocalMachine("node-1", "gpu8", "a", 1, 0.0, 2, "127.0.62.2", {"GPU": 8.0}, {}, "", "")
    address = start_meter(folder, purchase)
    assert address.startswith("127.0.62.2:")

    def page() -> str:
        return httpx.get(f"http://{address}/metrics").raise_for_status().text

    assert page().count("GpuIndex=") == 8
    assert parse_page(page(), 3.0) == {"gpu": Signal(0.0, 3.0)}
    set_use(tmp_path, "node-1", gpu=0.97)
    assert parse_page(page(), 4.0) == {"gpu": Signal(0.97, 4.0)}
    set_use(tmp_path, "node-1", gpu=None)
    assert parse_page(page(), 5.0) == {}
