"""The physical utilization of the nodes. It is read from the metrics endpoint of Ray's agent or of an exporter on each
machine.

One thread reads all endpoints every few seconds, each with a timeout. The controller uses the last readings.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Container, Iterable, Mapping

import httpx

from raytide.autoscaler.nodes.energy import EnergyMeter
from raytide.autoscaler.nodes.exporter.directory import ExporterDirectory
from raytide.autoscaler.nodes.node_page import (
    CLOCK_SKEW,
    PageSamples,
    clock_skew_s,
    meters_of,
    read_page,
    reading_of,
    with_exporter,
)
from raytide.autoscaler.providers.base import Machine
from raytide.autoscaler.ray_gcs import GcsReader
from raytide.core.clock import Clock
from raytide.core.errors import ClusterError
from raytide.core.logs import logger
from raytide.core.objects.node import NodeMeasurement, NodeReading, Use

log = logger(__name__)

_Pages = Mapping[str, PageSamples]
"""The samples on each node's page."""

PERIOD_S = 2.0
TIMEOUT_S = 2.0
"""The time limit, in seconds, for reading one page."""
MAX_CONCURRENT = 128
"""The number of concurrent requests: a round stays short even if half the nodes do not answer."""
MAX_NODES_PER_ROUND = 256
"""The most nodes that are read in one round; a page of Ray's agent has about 60 KB."""
_AGENT_ROUNDS = 5
"""The rounds between two readings of values that are only displayed. These are the values of machines without meters,
and those of Ray's agent on a machine whose exporter has the meters.
"""


class MeterReader:
    """Reads the nodes' meters in a background thread. The first call of `watch` starts the thread."""

    def __init__(
        self,
        gcs: GcsReader,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
        energy: EnergyMeter | None = None,
        directory: ExporterDirectory | None = None,
    ) -> None:
        """Only the thread uses `gcs` and `directory`. `transport` is for tests."""
        self._gcs, self._clock, self._transport, self._directory = gcs, clock, transport, directory
        self._machines: tuple[Machine, ...] = ()
        self._others: tuple[Machine, ...] = ()
        self._idle: Container[str] = ()
        self._round = 0
        self._use: dict[str, Use] = {}
        self._readings: dict[str, NodeReading] = {}
        self.energy = energy or EnergyMeter()
        self._agents: Mapping[str, str] = {}
        self._ports: Mapping[str, int] = {}
        """The announced ports of exporters, by Ray's names."""
        self._no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        """Pages come over plain HTTP. Without it, the client of each round would load all certificates again."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meters", daemon=True)

    def watch(self, machines: Iterable[Machine], idle: Container[str] = (), others: Iterable[Machine] = ()) -> None:
        """Sets the machines whose meters are read. If one round cannot read all of them, the machines in `idle` are
        read first. The meters of `others` influence no decision, and are read less often.
        """
        self._machines, self._idle, self._others = tuple(machines), idle, tuple(others)
        if (self._machines or self._others) and not self._thread.is_alive() and not self._stopped.is_set():
            self._thread.start()

    def last_readings(self) -> Mapping[str, Use]:
        """Returns the last reading of each meter, by node. A reading may be old."""
        return self._use

    def measured(self) -> Mapping[str, NodeMeasurement]:
        """Returns the last reading of each node's machine, with the machine's power and energy, by node id. A reading
        may be old.
        """
        joules, readings = self.energy.joules(), self._readings
        return {
            node_id: NodeMeasurement(reading, self.energy.power_w(node_id, reading), joules.get(node_id, {}))
            for node_id, reading in readings.items()
        }

    def agents(self) -> Mapping[str, str]:
        """Returns the metrics address (`host:port`) of Ray's agent on each machine, from the newest list. The keys are
        Ray's instance ids.
        """
        return self._agents

    def exporter_of(self, machine: Machine) -> str:
        """Returns the address `host:port` of the machine's exporter: the exporter that the provider knows, or else the
        exporter that announced itself in Ray's GCS. Returns an empty string if there is none.
        """
        ray_name = machine.ray_id or machine.node_id
        agent, port = self._agents.get(ray_name), self._ports.get(ray_name)
        if machine.meter or agent is None or port is None:
            return machine.meter
        return f"{agent.rpartition(':')[0]}:{port}"

    def close(self) -> None:
        self._stopped.set()

    def read_all(self) -> None:
        """Reads the meters of the machines whose turn it is in this round. A node that does not answer in time keeps
        its earlier readings.
        """
        machines, others = self._machines, self._others
        batch = self._next_batch(machines)
        if self._round % _AGENT_ROUNDS == 1:
            batch += others[: MAX_NODES_PER_ROUND - len(batch)]
        agents = self._agent_pages(batch)
        exporters = {machine.node_id: address for machine in batch if (address := self.exporter_of(machine))}
        found, of_agents = asyncio.run(self._read_all((exporters, agents)))
        meters = {node_id: meters_of(page) for node_id, page in of_agents.items()}
        has_meter = {machine.node_id for machine in batch if machine.meter}
        for node_id in exporters:
            own = meters.get(node_id, {})
            if node_id in has_meter:  # this exporter alone speaks for the GPUs, and the agent for the CPUs
                own.pop("gpu", None)
            meters[node_id] = {**own, **meters_of(found.get(node_id, {}))}
        before = self._use
        self._use = {m.node_id: {**before.get(m.node_id, {}), **meters.get(m.node_id, {})} for m in machines}
        self._note_readings((*machines, *others), of_agents, found)

    def _note_readings(self, machines: Iterable[Machine], agents: _Pages, exporters: _Pages) -> None:
        now_s, kept = self._clock.now_s(), {}
        for machine in machines:
            name, before = machine.node_id, self._readings.get(machine.node_id)
            reading = reading_of(agents[name], now_s) if name in agents else before
            if name in exporters:
                exporter = reading_of(exporters[name], now_s)
                reading = exporter if reading is None else with_exporter(exporter, reading)
            if reading is not None:
                kept[name] = reading
                if reading is not before:
                    self.energy.add(name, reading)
        self._readings = kept

    def _next_batch(self, machines: tuple[Machine, ...]) -> tuple[Machine, ...]:
        """Returns the machines to read in this round. If there are too many idle ones, a window moves over them by one
        machine a round, so that each is read in enough successive rounds to count as idle.
        """
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

    def _agent_pages(self, machines: Iterable[Machine]) -> dict[str, str]:
        """Returns the pages of Ray's agents to read in this round, except those of machines that Ray does not list."""
        try:
            self._agents = agents = self._gcs.metrics_addresses()
            if self._directory is not None and self._round % _AGENT_ROUNDS == 1:
                self._ports = self._directory.ports()
        except ClusterError as error:  # the controller reports it too, and nodes without readings stay
            log.warning("source failed", extra={"source": "metrics addresses", "error": str(error)})
            return {}
        names = {
            machine.node_id: machine.ray_id or machine.node_id
            for machine in machines
            if not machine.meter or self._round % _AGENT_ROUNDS == 1
        }
        return {node_id: agents[ray_id] for node_id, ray_id in names.items() if ray_id in agents}

    async def _read_all(self, groups: Iterable[Mapping[str, str]]) -> list[_Pages]:
        semaphore = asyncio.Semaphore(MAX_CONCURRENT)
        limits = httpx.Limits(max_connections=MAX_CONCURRENT)
        client = httpx.AsyncClient(  # nosec B113
            timeout=None, limits=limits, transport=self._transport, verify=self._no_tls, trust_env=False
        )
        async with client as http:  # each request has its own limit, see _read_page
            return await asyncio.gather(*(self._read_pages(http, pages, semaphore) for pages in groups))

    async def _read_pages(
        self, http: httpx.AsyncClient, pages: Mapping[str, str], semaphore: asyncio.Semaphore
    ) -> _Pages:
        answers = await asyncio.gather(*(self._read_page(http, address, semaphore) for address in pages.values()))
        return {node_id: page for node_id, page in zip(pages, answers, strict=True) if page is not None}

    async def _read_page(
        self, http: httpx.AsyncClient, address: str, semaphore: asyncio.Semaphore
    ) -> PageSamples | None:
        try:
            async with semaphore, asyncio.timeout(TIMEOUT_S):  # unlike httpx's limit, without the wait for a turn
                sent_s = self._clock.now_s()
                answer = await http.get(f"http://{address}/metrics")
            # Its stream refers to the answer: as a cycle, the page would stay until the next garbage collection.
            answer.raise_for_status().stream = httpx.ByteStream(b"")
            now_s = self._clock.now_s()
            found = read_page(answer.text, now_s)
            skew_s = clock_skew_s(answer.headers.get("date", ""), sent_s, now_s)
            return found if skew_s is None else {**found, CLOCK_SKEW: [(skew_s, now_s)]}
        except (httpx.HTTPError, ValueError, TimeoutError):  # its last readings go stale
            return None
