"""The scraper against pages in memory: Ray's agents and exporters, some of which do not answer."""

from __future__ import annotations

import asyncio
import gc
import ssl
import threading
from dataclasses import dataclass, field

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from raytide.autoscaler.nodes import utilization
from raytide.autoscaler.nodes.node_page import meters_of, read_page
from raytide.autoscaler.nodes.utilization import MAX_CONCURRENT, MeterReader
from raytide.autoscaler.providers.base import Machine
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError
from raytide.core.objects.node import Signal

PAGE = """# HELP ray_node_gpus_utilization Total GPUs usage on a ray node
# TYPE ray_node_gpus_utilization gauge
ray_node_gpus_utilization{GpuIndex="0",ip="10.0.0.7"} 3.0
ray_node_gpus_utilization{GpuIndex="1",ip="10.0.0.7"} 97.0
ray_node_gpus_available{GpuIndex="1",ip="10.0.0.7"} 1.0
ray_node_cpu_utilization{ip="10.0.0.7"} 12.5
"""


@dataclass
class Agents:
    """Ray's agents by id; a page of None does not answer."""

    pages: dict[str, str | None] = field(default_factory=dict)
    is_silent: bool = False

    def metrics_addresses(self) -> dict[str, str]:
        if self.is_silent:
            raise ClusterError("no answer")
        return {name: f"{name}:1" for name in self.pages}

    def handle(self, request: httpx.Request) -> httpx.Response:
        page = self.pages.get(request.url.host)
        if page is None:
            raise httpx.ConnectTimeout("too late")
        return httpx.Response(200 if page else 503, text=page)


def meters(agents: Agents, clock: VirtualClock) -> MeterReader:
    return MeterReader(agents, clock, httpx.MockTransport(agents.handle))  # type: ignore[arg-type]


def watched(agents: Agents, clock: VirtualClock, *machines: Machine) -> MeterReader:
    made = meters(agents, clock)
    made._machines = machines  # without its thread
    made.read_all()
    return made


def machine(node_id: str, **more: str) -> Machine:
    return Machine(node_id, "gpu8", "a", 1, 0.0, **more)


def test_the_busiest_gpu_speaks_for_the_node_and_a_page_s_own_time_counts() -> None:
    assert meters_of(read_page(PAGE, 5.0)) == {"gpu": Signal(0.97, 5.0), "cpu": Signal(0.125, 5.0)}
    assert meters_of(read_page('ray_node_cpu_utilization{ip="1"} 50 3000\n', 5.0)) == {"cpu": Signal(0.5, 3.0)}
    assert meters_of(read_page("", 5.0)) == {}
    assert len(list(text_string_to_metric_families(PAGE))) == 3, "Prometheus itself reads the page too"


@pytest.mark.parametrize("order", [("NaN", "0.0"), ("0.0", "NaN"), ("+Inf", "0.0")])
def test_a_gpu_of_which_nothing_is_known_leaves_nothing_known_of_the_node_s(order: tuple[str, str]) -> None:
    page = "".join(f'ray_node_gpus_utilization{{GpuIndex="{at}"}} {value}\n' for at, value in enumerate(order))
    assert meters_of(read_page(page + "ray_node_cpu_utilization 50\n", 5.0)) == {"cpu": Signal(0.5, 5.0)}


def test_every_node_is_asked_where_it_speaks_whoever_is_silent() -> None:
    agents = Agents(
        {"node-1": PAGE, "pod-x": PAGE, "exporter": PAGE, "node-3": None, "node-4": "", "node-5": "{nonsense"}
    )
    machines = [machine("node-1"), machine("node-2", ray_id="pod-x"), machine("node-6", meter="exporter:9")]
    machines += [machine("node-3"), machine("node-4"), machine("node-5"), machine("node-7")]
    heard = watched(agents, VirtualClock(5.0), *machines).last_readings()
    assert {node_id for node_id, use in heard.items() if use} == {"node-1", "node-2", "node-6"}


def test_a_last_word_keeps_its_time_and_a_machine_that_is_gone_is_forgotten() -> None:
    agents, clock = Agents({"node-1": PAGE, "node-2": PAGE}), VirtualClock(5.0)
    made = watched(agents, clock, machine("node-1"), machine("node-2"))
    clock.advance(60.0)
    agents.pages["node-1"] = None
    made._machines = (machine("node-1"),)
    made.read_all()
    assert made.last_readings()["node-1"]["gpu"] == Signal(0.97, 5.0)
    assert made.last_readings().keys() == {"node-1"}
    agents.is_silent = True
    made.read_all()
    assert made.last_readings()["node-1"]["gpu"].at_s == 5.0


def test_an_exporter_speaks_for_the_gpus_of_its_node_and_the_agent_for_its_cpus() -> None:
    gpus = "ray_node_gpus_utilization 20\n"
    agents = Agents({"node-1": PAGE, "exporter": gpus})
    with_exporter = machine("node-1", meter="exporter:9")
    use = watched(agents, VirtualClock(5.0), with_exporter).last_readings()["node-1"]
    assert use == {"cpu": Signal(0.125, 5.0), "gpu": Signal(0.2, 5.0)}
    agents.pages["exporter"] = None
    use = watched(agents, VirtualClock(5.0), with_exporter).last_readings()["node-1"]
    assert use == {"cpu": Signal(0.125, 5.0)}, "what the agent says of the GPUs is no stand-in for the exporter"


class Slow(httpx.AsyncBaseTransport):
    """Some never end their page."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host.startswith("slow"):
            await asyncio.Event().wait()
        return httpx.Response(200, text=PAGE)


def test_many_that_never_end_their_page_silence_nobody_else() -> None:
    made = MeterReader(Agents(), VirtualClock(5.0), Slow())  # type: ignore[arg-type]
    slow = [machine(f"node-{n}", meter=f"slow-{n}:9") for n in range(MAX_CONCURRENT)]
    made._machines = (*slow, machine("node-x", meter="quick:9"))
    made.read_all()
    assert [node_id for node_id, use in made.last_readings().items() if use] == ["node-x"]


def test_of_too_many_nodes_the_idle_ones_are_asked_and_each_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "MAX_NODES_PER_ROUND", 2)
    agents = Agents({f"node-{n}": PAGE for n in range(5)})
    made = meters(agents, VirtualClock(5.0))
    made._machines, made._idle = tuple(machine(f"node-{n}") for n in range(5)), {"node-4"}
    made.read_all()
    assert [node_id for node_id, use in made.last_readings().items() if use] == ["node-0", "node-4"]
    made._idle = {"node-1", "node-2", "node-3", "node-4"}
    for _ in range(4):
        made.read_all()
    assert [node_id for node_id, use in made.last_readings().items() if use] == [f"node-{n}" for n in range(5)]


def test_a_round_loads_no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *args, **_: loaded.append(args))
    made = MeterReader(Agents(), VirtualClock(5.0))  # type: ignore[arg-type]
    made.read_all()
    assert loaded == []


def answers_in_memory() -> int:
    return sum(type(each) is httpx.Response for each in gc.get_objects())


def test_a_page_that_was_read_waits_for_no_garbage_collection() -> None:
    made = watched(Agents({"n1": PAGE}), VirtualClock(5.0), machine("n1"))
    gc.collect()
    gc.disable()
    try:
        before = answers_in_memory()
        made.read_all()
        assert answers_in_memory() == before
    finally:
        gc.enable()
    assert "n1" in made.measured()


def test_watching_waits_for_nobody() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hang(request: httpx.Request) -> httpx.Response:
        asked.set()
        go_on.wait(30)
        return httpx.Response(200, text=PAGE)

    made = MeterReader(Agents(), VirtualClock(), httpx.MockTransport(hang))  # type: ignore[arg-type]
    made.watch(machine(f"node-{n}", meter="exporter:9") for n in range(3))
    assert asked.wait(30)
    assert made.last_readings() == {}
    made.close()
    go_on.set()
    made._thread.join(30)
    assert not made._thread.is_alive()
    made.watch([machine("node-1", meter="exporter:9")])
    assert not made._thread.is_alive()
