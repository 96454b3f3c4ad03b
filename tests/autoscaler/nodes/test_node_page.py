"""Pages of Ray's agent and of an exporter, read as measurements of a machine."""

from __future__ import annotations

from email.utils import formatdate

import httpx
import pytest
from tests.autoscaler.nodes.test_utilization import Agents, machine

from raytide.autoscaler.nodes.energy import EnergyMeter
from raytide.autoscaler.nodes.node_page import clock_skew_s, read_page, reading_of, with_exporter
from raytide.autoscaler.nodes.utilization import MeterReader
from raytide.core.clock import VirtualClock
from raytide.core.objects.node import NodeReading, Signal

AGENT = """ray_node_cpu_utilization{ip="1"} 25.0
ray_node_cpu_count{ip="1"} 8.0
ray_node_mem_used{ip="1"} 6.0e9
ray_node_mem_total{ip="1"} 24.0e9
ray_node_disk_usage{ip="1"} 30.0
ray_node_disk_free{ip="1"} 70.0
ray_node_network_receive_speed{ip="1"} 1000.0
ray_node_network_send_speed{ip="1"} 2000.0
ray_node_disk_io_read_speed{ip="1"} 3000.0
ray_node_disk_io_write_speed{ip="1"} 4000.0
ray_node_gpu_power_milliwatts{GpuIndex="0"} 250000.0
ray_node_gpu_power_milliwatts{GpuIndex="1"} 150000.0
"""
EXPORTER = """DCGM_FI_DEV_POWER_USAGE{gpu="0"} 100.0
DCGM_FI_DEV_POWER_USAGE{gpu="1"} 200.0
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0"} 5.0e6
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="1"} 7.0e6
"""


def test_an_agent_s_page_gives_all_that_it_says() -> None:
    assert reading_of(read_page(AGENT, 5.0), 5.0) == NodeReading(
        5.0, 0.25, 0.3, 1000.0, 2000.0, 3000.0, 4000.0, cores_used=2.0, gpu_power_w=400.0
    )
    assert reading_of(read_page("", 5.0), 5.0) == NodeReading(5.0)
    broken = AGENT.replace("250000.0", "NaN").replace("24.0e9", "0")
    found = reading_of(read_page(broken, 5.0), 5.0)
    assert (found.gpu_power_w, found.memory_use) == (None, None), "a failing driver, and no total"


def test_a_machine_with_an_exporter_is_read_at_both_and_its_counter_of_energy_counts() -> None:
    agents, clock = Agents({"exporter": EXPORTER, "node-1": AGENT}), VirtualClock(100.0)
    made = MeterReader(agents, clock, httpx.MockTransport(agents.handle), EnergyMeter(watts_per_core=10.0))  # type: ignore[arg-type]
    made._machines = (machine("node-1", meter="exporter:9"),)
    made.read_all()
    measured = made.measured()["node-1"]
    assert (measured.reading.memory_use, measured.reading.gpu_power_w) == (0.25, 300.0)
    assert measured.power_w == {"nvml": 300.0, "estimate": 20.0}
    clock.advance(2.0)
    agents.pages["exporter"] = EXPORTER.replace("5.0e6", "5.5e6")
    made.read_all()
    assert made.measured()["node-1"].joules == {"nvml": pytest.approx(500.0), "estimate": pytest.approx(40.0)}
    of_the_agent = {"cpu": Signal(0.25, 100.0)}
    assert made.last_readings() == {"node-1": of_the_agent}, "the exporter speaks for GPUs alone"
    made._machines = ()
    made.read_all()
    assert made.measured() == {}


def test_power_counts_until_the_next_reading_but_not_for_ever_and_a_reset_counter_loses_nothing() -> None:
    meter = EnergyMeter(watts_per_core=1.0)
    for reading in (
        NodeReading(0.0, gpu_power_w=10.0, cores_used=1.0),
        NodeReading(2.0, gpu_power_w=100.0),  # 20 J, 2 J
        NodeReading(1.0, gpu_power_w=100.0),  # the clock stepped back
        NodeReading(3601.0, gpu_power_w=1.0, gpu_energy_j=50.0),  # at most a minute: 6000 J
        NodeReading(3603.0, gpu_power_w=2.0, gpu_energy_j=20.0),  # the driver was loaded again: 2 J by power
        NodeReading(3605.0, gpu_energy_j=25.0),  # 5 J
    ):
        meter.add("n", reading)
    assert meter.joules() == {"n": {"nvml": 6027.0, "estimate": 2.0}}


def test_a_gpu_that_tells_no_energy_once_does_not_return_with_that_of_its_life() -> None:
    both = EXPORTER + 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 50\nDCGM_FI_DEV_GPU_UTIL{gpu="1"} 50\n'
    one = "".join(line for line in both.splitlines(True) if "7.0e6" not in line)
    meter = EnergyMeter()
    for at_s, page in ((0.0, both), (2.0, one), (4.0, both.replace("5.0e6", "6.0e6").replace("7.0e6", "8.0e6"))):
        meter.add("n", reading_of(read_page(page, at_s), at_s))
    assert meter.joules() == {"n": {"nvml": 1200.0}}, "four seconds at 300 W"


@pytest.mark.parametrize(
    ("machine_s", "skew_s"), [(1000.0, 0.0), (1000.9, 0.0), (1005.5, 4.8), (990.0, -9.2), (999.9, -0.2)]
)
def test_a_machine_s_clock_is_compared_by_the_date_of_its_answers(machine_s: float, skew_s: float) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        date = formatdate(int(machine_s), usegmt=True)
        return httpx.Response(200, text=AGENT, headers={"date": date} if request.url.host == "node-1" else {})

    agents, clock = Agents({"node-1": AGENT, "node-2": AGENT}), VirtualClock(1000.2)
    made = MeterReader(agents, clock, httpx.MockTransport(handle))  # type: ignore[arg-type]
    made._machines = (machine("node-1"), machine("node-2"))
    made.read_all()
    found = made.measured()
    assert found["node-1"].reading.clock_skew_s == pytest.approx(skew_s, abs=1e-6)
    assert found["node-2"].reading.clock_skew_s is None, "it says no time"


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 99 Foo 2026 00:00:00 GMT", "Mon, 01 Jan 99999 00:00:00 GMT"])
def test_an_invalid_date_tells_nothing(date: str) -> None:
    assert clock_skew_s(date, 5.0, 6.0) is None


def test_without_nvidia_s_driver_the_agent_s_power_stays() -> None:
    agent, exporter = reading_of(read_page(AGENT, 5.0), 5.0), reading_of(read_page("node_vmstat_oom_kill 3", 6.0), 6.0)
    both = with_exporter(exporter, agent)
    assert (both.gpu_power_w, both.oom_kills, both.at_s) == (400.0, 3.0, 6.0)
