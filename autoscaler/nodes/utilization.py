"""Physical use of the nodes, read from the metrics endpoint of each: Ray's own agent, or an exporter of the machine's.

One thread asks them all every few seconds, each with a timeout; the controller's loop takes what was last heard.
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
"""For a whole page, from when it is asked."""
MAX_CONCURRENT = 128
"""So that a round is short although half of them are silent."""
MAX_NODES_PER_ROUND = 256
"""Asked in one round: a page of Ray's agent has about 60 KB."""
_METERS: dict[str, Meter] = {"ray_node_cpu_utilization": "cpu", "ray_node_gpus_utilization": "gpu"}
"""Percent, in the names that Ray's agent gives them."""


class MeterReader:
    """Asks from the first `watch` on. `transport` is for tests."""

    def __init__(self, gcs: GcsReader, clock: Clock, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`gcs` is used by the thread alone."""
        self._gcs, self._clock, self._transport = gcs, clock, transport
        self._machines: tuple[Machine, ...] = ()
        self._idle: Container[str] = ()
        self._round = 0
        self._readings: dict[str, Use] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meters", daemon=True)

    def watch(self, machines: Iterable[Machine], idle: Container[str] = ()) -> None:
        """From now on ask about these; about some, first of all the idle ones, if there are too many."""
        self._machines, self._idle = tuple(machines), idle
        if self._machines and not self._thread.is_alive() and not self._stopped.is_set():
            self._thread.start()

    def last_readings(self) -> Mapping[str, Use]:
        """By node, the last word of each of its meters, however old."""
        return self._readings

    def close(self) -> None:
        self._stopped.set()

    def read_all(self) -> None:
        """One round. Who does not answer in time is left with what it said before."""
        machines, before = self._machines, self._readings
        words = asyncio.run(self._read_pages(self._addresses(self._next_batch(machines))))
        self._readings = {m.node_id: {**before.get(m.node_id, {}), **words.get(m.node_id, {})} for m in machines}

    def _next_batch(self, machines: tuple[Machine, ...]) -> tuple[Machine, ...]:
        """Whose turn it is. Of too many idle ones another joins in each round: all have theirs, and each is asked for
        long enough without a break to be seen idle."""
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
            except Exception:  # whatever it was, the next round may go well; until then last words grow old
                log.exception("meters failed")
            self._stopped.wait(PERIOD_S)

    def _addresses(self, machines: Iterable[Machine]) -> dict[str, str]:
        """Where each of them is to be asked; those are left out that Ray does not list."""
        own = {machine.node_id: machine.meter for machine in machines if machine.meter}
        rays = {machine.node_id: machine.ray_id or machine.node_id for machine in machines if not machine.meter}
        if not rays:
            return own
        try:
            agents = self._gcs.metrics_addresses()
        except ClusterError as error:  # the loop says it too, and nodes that are not heard of stay
            log.warning("source failed", extra={"source": "metrics addresses", "error": str(error)})
            return own
        return {**own, **{node_id: agents[ray_id] for node_id, ray_id in rays.items() if ray_id in agents}}

    async def _read_pages(self, pages: Mapping[str, str]) -> dict[str, Use]:
        turns = asyncio.Semaphore(MAX_CONCURRENT)
        limits = httpx.Limits(max_connections=MAX_CONCURRENT)
        client = httpx.AsyncClient(timeout=None, limits=limits, transport=self._transport, trust_env=False)  # nosec B113
        async with client as http:  # each request has its own limit, see _ask_one
            answers = await asyncio.gather(*(self._read_page(http, address, turns) for address in pages.values()))
        return dict(zip(pages, answers, strict=True))

    async def _read_page(self, http: httpx.AsyncClient, address: str, turns: asyncio.Semaphore) -> Use:
        try:
            async with turns, asyncio.timeout(TIMEOUT_S):  # whoever waits for a turn is not late; httpx would say so
                page = (await http.get(f"http://{address}/metrics")).raise_for_status().text
            return parse_page(page, self._clock.now_s())
        except (httpx.HTTPError, ValueError, TimeoutError):  # silence: its last word grows old
            return {}


def parse_page(page: str, now_s: float) -> dict[Meter, Signal]:
    """The meters on a page of Prometheus' text format, the busiest GPU for all of a node's.

    One that says NaN of any GPU (a driver that fails) knows nothing of the node: the GPU may be in use.
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
