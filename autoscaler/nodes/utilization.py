"""Physical utilization of the nodes, from the metrics endpoint of each: Ray's agent, or an exporter on the machine.

One thread reads all endpoints every few seconds, each with a timeout; the controller uses the last readings.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Container, Iterable, Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from raytide.autoscaler.providers.base import Machine
from raytide.autoscaler.ray_gcs import GcsReader
from raytide.core.clock import Clock
from raytide.core.errors import ClusterError
from raytide.core.logs import logger
from raytide.core.objects.node import Meter, Signal, Use

log = logger(__name__)

PERIOD_S = 2.0
TIMEOUT_S = 2.0
"""The time limit of one page."""
MAX_CONCURRENT = 128
"""Concurrent requests: a round stays short even if half the nodes do not answer."""
MAX_NODES_PER_ROUND = 256
"""A page of Ray's agent has about 60 KB."""
_METERS: dict[str, Meter] = {"ray_node_cpu_utilization": "cpu", "ray_node_gpus_utilization": "gpu"}
"""Keyed by the metric names of Ray's agent; values in percent."""


class MeterReader:
    """Reads meters in a thread that starts with the first `watch`."""

    def __init__(self, gcs: GcsReader, clock: Clock, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Only the thread uses `gcs`. `transport` is for tests."""
        self._gcs, self._clock, self._transport = gcs, clock, transport
        self._machines: tuple[Machine, ...] = ()
        self._idle: Container[str] = ()
        self._round = 0
        self._readings: dict[str, Use] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meters", daemon=True)

    def watch(self, machines: Iterable[Machine], idle: Container[str] = ()) -> None:
        """Sets the machines to read. Of too many, the idle ones come first."""
        self._machines, self._idle = tuple(machines), idle
        if self._machines and not self._thread.is_alive() and not self._stopped.is_set():
            self._thread.start()

    def last_readings(self) -> Mapping[str, Use]:
        """Returns the last reading of each meter by node, however old."""
        return self._readings

    def close(self) -> None:
        self._stopped.set()

    def read_all(self) -> None:
        """Reads one round. A node that does not answer in time keeps its earlier readings."""
        machines, before = self._machines, self._readings
        readings = asyncio.run(self._read_pages(self._addresses(self._next_batch(machines))))
        self._readings = {m.node_id: {**before.get(m.node_id, {}), **readings.get(m.node_id, {})} for m in machines}

    def _next_batch(self, machines: tuple[Machine, ...]) -> tuple[Machine, ...]:
        """Returns the machines of this round. With too many idle ones a window rotates over them, by one each round, so
        that each is read without a break for long enough to count as idle."""
        idle = tuple(machine for machine in machines if machine.node_id in self._idle)
        self._round += 1
        if len(idle) > MAX_NODES_PER_ROUND:
            at = self._round % len(idle)
            return (idle[at:] + idle[:at])[:MAX_NODES_PER_ROUND]
        return (*idle, *(machine for machine in machines if machine.node_id not in self._idle))[:MAX_NODES_PER_ROUND]

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.read_all()
            except Exception:  # the next round may succeed; until then readings go stale
                log.exception("meters failed")
            self._stopped.wait(PERIOD_S)

    def _addresses(self, machines: Iterable[Machine]) -> dict[str, str]:
        """Returns the metrics address of each machine, without those that Ray does not list."""
        exporters = {machine.node_id: machine.meter for machine in machines if machine.meter}
        ray_ids = {machine.node_id: machine.ray_id or machine.node_id for machine in machines if not machine.meter}
        if not ray_ids:
            return exporters
        try:
            agents = self._gcs.metrics_addresses()
        except ClusterError as error:  # the controller reports it too, and nodes without readings stay
            log.warning("source failed", extra={"source": "metrics addresses", "error": str(error)})
            return exporters
        return {**exporters, **{node_id: agents[ray_id] for node_id, ray_id in ray_ids.items() if ray_id in agents}}

    async def _read_pages(self, pages: Mapping[str, str]) -> dict[str, Use]:
        semaphore = asyncio.Semaphore(MAX_CONCURRENT)
        limits = httpx.Limits(max_connections=MAX_CONCURRENT)
        client = httpx.AsyncClient(timeout=None, limits=limits, transport=self._transport, trust_env=False)  # nosec B113
        async with client as http:  # each request has its own limit, see _ask_one
            answers = await asyncio.gather(*(self._read_page(http, address, semaphore) for address in pages.values()))
        return dict(zip(pages, answers, strict=True))

    async def _read_page(self, http: httpx.AsyncClient, address: str, semaphore: asyncio.Semaphore) -> Use:
        try:
            async with semaphore, asyncio.timeout(TIMEOUT_S):  # unlike httpx's limit, without the wait for a turn
                page = (await http.get(f"http://{address}/metrics")).raise_for_status().text
            return parse_page(page, self._clock.now_s())
        except (httpx.HTTPError, ValueError, TimeoutError):  # its last readings go stale
            return {}


def parse_page(page: str, now_s: float) -> dict[Meter, Signal]:
    """Returns the meters on a page in Prometheus' text format; of several GPUs, the busiest.

    A NaN for any GPU (a failing driver) makes the meter unknown: that GPU may be in use.
    """
    lines = [line for line in page.splitlines() if line.startswith(tuple(_METERS))]  # a page has hundreds of others
    found: dict[Meter, Signal] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            meter = _METERS.get(sample.name)
            if meter is None:
                continue
            signal = Signal(sample.value / 100.0, now_s if sample.timestamp is None else float(sample.timestamp))
            if meter not in found or not math.isfinite(signal.value) or signal.value > found[meter].value:
                found[meter] = signal
    return {meter: signal for meter, signal in found.items() if math.isfinite(signal.value)}
