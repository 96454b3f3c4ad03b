"""Serves a node's metrics page and announces its port: `python -m raytide.autoscaler.nodes.exporter.server NODE GCS`.

NODE is raytide's id of the node. The node's address is looked up in Ray by this id. GCS is the address of Ray's GCS.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pynvml
from prometheus_client import CollectorRegistry, start_http_server

from raytide.autoscaler.nodes.exporter.directory import ANNOUNCE_EVERY_S, ExporterDirectory
from raytide.autoscaler.nodes.exporter.kernel import VMSTAT, KernelCollector, oom_kills
from raytide.autoscaler.nodes.exporter.nvml import GpuCollector
from raytide.autoscaler.nodes.exporter.rapl import POWERCAP, RaplCollector
from raytide.autoscaler.ray_gcs import GcsReader
from raytide.core.clock import SystemClock
from raytide.core.errors import ClusterError
from raytide.core.logs import log_to, logger
from raytide.core.ray_internals import gcs_client

_RETRY_S = 2.0

log = logger(__name__)


def start_exporter(
    node_id: str, address: str, gcs_address: str, *, powercap: Path = POWERCAP, vmstat: Path = VMSTAT
) -> int:
    """Serves this machine's metrics page from threads of this process, and returns the port.

    Returns 0 and serves nothing if the machine has nothing to show: no NVIDIA driver, no energy counters, and no count
    of OOM kills.
    """
    registry = CollectorRegistry()
    rapl = RaplCollector(powercap)
    has_gpus = False
    try:
        registry.register(GpuCollector(node_id, address))
        has_gpus = True
    except pynvml.NVMLError as error:
        log.info("no GPUs are measured", extra={"reason": str(error)})
    if rapl.has_counters:
        registry.register(rapl)
    if knows_kills := oom_kills(vmstat) is not None:
        registry.register(KernelCollector(vmstat))
    if not (has_gpus or rapl.has_counters or knows_kills):
        return 0
    server, _ = start_http_server(0, addr=address, registry=registry)
    port = int(server.server_port)
    directory = ExporterDirectory(lambda: gcs_client(gcs_address), SystemClock())
    announcer = threading.Thread(target=_announce, args=(directory, node_id, port), name="announcer", daemon=True)
    announcer.start()
    return port


def _announce(directory: ExporterDirectory, node_id: str, port: int) -> None:
    """Announces the port periodically: a restarted GCS has lost it, and the controller sees by it that the exporter is
    alive.
    """
    clock, last = SystemClock(), ""
    while True:
        try:
            directory.announce(node_id, port)
            last = ""
        except ClusterError as error:
            if str(error) != last:
                last = str(error)
                log.warning("the exporter is not announced yet", extra={"error": last})
        clock.sleep(ANNOUNCE_EVERY_S)


def _address(node_id: str, gcs_address: str) -> str:
    """Waits until the node has joined Ray, and returns its address."""
    gcs, clock, last = GcsReader(gcs_address), SystemClock(), ""
    while True:
        try:
            for node in gcs.nodes():
                if node.node_id == node_id and node.is_alive:
                    return node.address
            error = "it is not in Ray"
        except ClusterError as no_answer:
            error = str(no_answer)
        if error != last:
            last = error
            log.warning("the node's address is not known yet", extra={"node": node_id, "error": error})
        clock.sleep(_RETRY_S)


def main(node_id: str, gcs_address: str) -> int:
    log_to()
    address = _address(node_id, gcs_address)
    port = start_exporter(node_id, address, gcs_address)
    if not port:
        return 0
    log.info("exporter started", extra={"node": node_id, "address": f"{address}:{port}"})
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
