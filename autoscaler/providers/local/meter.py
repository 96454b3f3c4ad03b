"""The fake GPU exporter of a local node, with the metrics of Ray's agent on a real GPU machine.

Ray's agents on local nodes all measure the one machine that they share. `set_use` sets the utilization of the node's
GPUs from any process; it starts at zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from raytide.autoscaler.providers.local.files import LocalMachine, NodeFolder
from raytide.core.io.atomic_file import read_json, write_json


def start_meter(folder: NodeFolder, purchase: LocalMachine) -> str:
    """Serves the node's metrics page from a thread of this process, and returns its `host:port`."""
    registry = CollectorRegistry()
    registry.register(_Gpus(folder, int(purchase.resources["GPU"])))
    server, _ = start_http_server(0, addr=purchase.address, registry=registry)
    return f"{purchase.address}:{server.server_port}"


def set_use(run_dir: Path, node_id: str, gpu: float | None) -> None:
    """Sets the utilization of each GPU of the node; None removes the metric."""
    write_json(run_dir / "nodes" / node_id / "use.json", {"gpu": gpu})


class _Gpus:
    def __init__(self, folder: NodeFolder, gpus: int) -> None:
        self._folder, self._gpus = folder, gpus

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Returns nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        use = (read_json(self._folder.path / "use.json") or {"gpu": 0.0})["gpu"]
        if use is None:
            return
        family = GaugeMetricFamily(
            "ray_node_gpus_utilization", "Percent of its time that a GPU works", labels=("ip", "GpuIndex")
        )
        for gpu in range(self._gpus):
            family.add_metric((self._folder.node_id, str(gpu)), 100.0 * use)
        yield family
