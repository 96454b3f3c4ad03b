"""The exporter of a node: NVIDIA's own bindings on a stand-in for its library, and the kernel's energy files."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pynvml
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.autoscaler.nodes.exporter.fake_nvml import HEALTHY, make_library, write_gpu
from tests.autoscaler.nodes.test_node_page import AGENT
from tests.autoscaler.nodes.test_utilization import Agents, machine
from tests.autoscaler.providers.notices.key_values import KeyValues

from raytide.autoscaler.nodes.exporter import nvml
from raytide.autoscaler.nodes.exporter.directory import ExporterDirectory
from raytide.autoscaler.nodes.exporter.kernel import oom_kills
from raytide.autoscaler.nodes.exporter.nvml import GpuCollector
from raytide.autoscaler.nodes.exporter.rapl import RaplCollector
from raytide.autoscaler.nodes.node_page import meters_of, read_page, reading_of
from raytide.autoscaler.nodes.utilization import MeterReader
from raytide.autoscaler.providers.hosts import node
from raytide.autoscaler.providers.local.files import LocalMachine, NodeFolder
from raytide.core.clock import VirtualClock
from raytide.core.objects.node import Signal

SERVE = """
import sys, time
from pathlib import Path
from raytide.autoscaler.nodes.exporter import server
server._announce = lambda directory, node_id, port: print(node_id, port, flush=True)
folders = {"powercap": Path(sys.argv[1]), "vmstat": Path(sys.argv[1], "vmstat")}
if not server.start_exporter("node-1", "127.0.0.1", "127.0.0.1:9", **folders):
    print("nothing to measure", flush=True)
time.sleep(120)
"""


def write_package(folder: Path, name: str, microjoules: int, turn: int = 10**9) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "energy_uj").write_text(f"{microjoules}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{turn}\n")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_library(tmp_path_factory.mktemp("nvml"))


class Exporter:
    """An exporter in a process of its own, since a process loads the driver's library once."""

    def __init__(self, gpus: Path | None, library: Path, powercap: Path) -> None:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
        environment |= {} if gpus is None else {"FAKE_NVML": str(gpus)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(powercap)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline().strip()

    def page(self) -> str:
        _, port = self.first_line.split()
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60.0).raise_for_status().text

    def values(self, metric: str) -> dict[str, float]:
        """Returns the values by GPU or package."""
        families = text_string_to_metric_families(self.page())
        samples = (sample for family in families for sample in family.samples if sample.name == metric)
        return {sample.labels.get("gpu", sample.labels.get("index", "")): sample.value for sample in samples}


@pytest.fixture
def start(library: Path, tmp_path: Path) -> Iterator[type]:
    started: list[Exporter] = []

    def begin(gpus: Path | None, powercap: Path = tmp_path / "none") -> Exporter:
        started.append(Exporter(gpus, library, powercap))
        return started[-1]

    yield begin  # type: ignore[misc]
    for each in started:
        each.process.kill()
        each.process.wait(10)


def test_each_gpu_is_shown_under_the_names_of_dcgm_and_read_as_its_node_s_meter(start: type, tmp_path: Path) -> None:
    write_gpu(tmp_path, 0, HEALTHY)
    write_gpu(tmp_path, 1, {**HEALTHY, "use": 90, "milliwatts": 649_500})
    exporter = start(tmp_path)
    page = exporter.page()
    at = 'Hostname="127.0.0.1",UUID="GPU-fake-1",gpu="1",modelName="NVIDIA H100 80GB HBM3",node="node-1"'
    assert f"DCGM_FI_DEV_GPU_UTIL{{{at}}} 90.0" in page.splitlines()
    assert exporter.values("DCGM_FI_DEV_SM_CLOCK") == {"0": 1980.0, "1": 1980.0}
    assert exporter.values("DCGM_FI_DEV_GPU_TEMP") == {"0": 61.0, "1": 61.0}
    assert exporter.values("DCGM_FI_DEV_FB_USED") == {"0": 3072.0, "1": 3072.0}
    assert exporter.values("DCGM_FI_DEV_FB_FREE") == {"0": 77 * 1024.0, "1": 77 * 1024.0}
    assert exporter.values("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL") == {"0": 0.0, "1": 0.0}
    samples = read_page(page, 5.0)
    assert meters_of(samples) == {"gpu": Signal(0.9, 5.0)}
    reading = reading_of(samples, 5.0)
    assert (reading.gpu_power_w, reading.gpu_energy_j) == (1000.0, 18_000.0)


def test_an_error_that_the_driver_reports_and_rising_counts_are_shown(start: type, tmp_path: Path) -> None:
    write_gpu(tmp_path, 0, HEALTHY)
    write_gpu(tmp_path, 1, HEALTHY)
    exporter = start(tmp_path)
    assert exporter.values("DCGM_FI_DEV_XID_ERRORS") == {"0": 0.0, "1": 0.0}
    write_gpu(tmp_path, 1, {**HEALTHY, "xid": 79, "uuid": -1, "ecc": 3, "remapped": 2})
    deadline = time.monotonic() + 120.0
    while exporter.values("DCGM_FI_DEV_XID_ERRORS") != {"0": 0.0, "1": 79.0}:
        assert time.monotonic() < deadline, "the XID error is not shown"
        time.sleep(0.05)
    assert exporter.values("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL") == {"0": 0.0, "1": 3.0}
    assert exporter.values("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS") == {"0": 0.0, "1": 2.0}


def test_a_gpu_that_left_the_bus_before_the_exporter_began_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> int:
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda device: f"GPU-{device}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda device: "H100")
    monkeypatch.setattr(nvml, "_values", lambda device: {nvml.dcgm.GPU_TEMP: 60.0 + device})
    monkeypatch.setattr(GpuCollector, "_watch_xids", lambda self: None)
    families = {family.name: family for family in GpuCollector("node-1", "10.0.0.1").collect()}
    samples = families["DCGM_FI_DEV_GPU_TEMP"].samples
    assert {(each.labels["gpu"], each.labels["UUID"]): each.value for each in samples} == {
        ("1", "GPU-1"): 61.0,
        ("2", "GPU-2"): 62.0,
    }
    assert [str(each.value) for each in families["DCGM_FI_DEV_GPU_UTIL"].samples] == ["nan"]


def test_the_xid_error_of_a_gpu_that_left_the_bus_is_kept_and_the_other_gpus_are_watched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = (ctypes.c_int * 2)()

    def handle(index: int) -> Any:
        return ctypes.cast(ctypes.byref(gpus, index * ctypes.sizeof(ctypes.c_int)), pynvml.c_nvmlDevice_t)

    def event(index: int, xid: int) -> Any:
        return pynvml.c_nvmlEventData_t(device=handle(index), eventData=xid)

    lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    monkeypatch.setattr(nvml, "_RETRY_S", 0.0)
    monkeypatch.setattr(pynvml, "nvmlEventSetCreate", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceRegisterEvents", lambda *_: None)
    monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", Mock(side_effect=[event(1, 79), lost, event(0, 13)]))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", Mock(side_effect=lost))
    collector = object.__new__(GpuCollector)
    collector._devices, collector._uuids, collector._xids = [handle(0), handle(1)], ["GPU-0", "GPU-1"], {}
    with pytest.raises(StopIteration):  # the driver has told everything
        collector._watch_xids()
    assert collector._xids == {"GPU-0": 13.0, "GPU-1": 79.0}


def test_a_value_that_a_gpu_lacks_is_left_out_and_a_lost_gpu_s_use_is_unknown(start: type, tmp_path: Path) -> None:
    write_gpu(tmp_path, 0, {"use": 5, "temperature": 40})
    write_gpu(tmp_path, 1, HEALTHY)
    exporter = start(tmp_path)
    assert exporter.values("DCGM_FI_DEV_GPU_TEMP") == {"0": 40.0, "1": 61.0}
    assert exporter.values("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL") == {"1": 0.0}
    write_gpu(tmp_path, 1, dict.fromkeys(HEALTHY, -1))
    samples = read_page(exporter.page(), 5.0)
    assert meters_of(samples) == {}, "work that nobody sees may run on the lost GPU"
    assert exporter.values("DCGM_FI_DEV_GPU_TEMP") == {"0": 40.0}


def test_a_machine_without_a_driver_shows_the_energy_of_its_cpus_and_one_without_both_serves_nothing(
    start: type, tmp_path: Path
) -> None:
    write_package(tmp_path, "intel-rapl:0", 5_000_000)
    exporter = start(None, tmp_path)
    write_package(tmp_path, "intel-rapl:0", 7_500_000)
    assert exporter.values("node_rapl_package_joules_total") == {"0": 2.5}
    assert reading_of(read_page(exporter.page(), 5.0), 5.0).cpu_energy_j == 2.5
    assert start(None).first_line == "nothing to measure"


def test_the_links_between_gpus_are_counted_and_a_gpu_without_any_has_no_count(start: type, tmp_path: Path) -> None:
    write_gpu(tmp_path, 0, HEALTHY)
    write_gpu(tmp_path, 1, {**HEALTHY, "links": 4, "links_down": 0})
    exporter = start(tmp_path)
    assert exporter.values("raytide_gpu_nvlinks") == {"1": 4.0}
    write_gpu(tmp_path, 1, {**HEALTHY, "links": 4, "links_down": 1})
    assert exporter.values("raytide_gpu_nvlinks") == {"1": 3.0}
    assert exporter.values("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL") == {"1": 0.0 + 1 + 2 + 3}
    assert exporter.values("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL") == {}, "this driver does not count them"


def test_processes_that_the_kernel_ended_are_shown_under_node_exporter_s_name(start: type, tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 7\noom_kill_odd 8\n")
    exporter = start(None, tmp_path)
    assert "node_vmstat_oom_kill 7.0" in exporter.page().splitlines()
    assert reading_of(read_page(exporter.page(), 5.0), 5.0).oom_kills == 7.0
    assert oom_kills(tmp_path / "none") is None
    assert oom_kills() is not None, "this machine's own kernel tells it"


def test_counters_of_cpus_turn_and_their_parts_do_not_count_twice(tmp_path: Path) -> None:
    write_package(tmp_path, "intel-rapl:0", 999_000_000)
    write_package(tmp_path, "intel-rapl:1", 1_000_000)
    write_package(tmp_path, "intel-rapl:0:0", 5)  # the cores of package 0
    write_package(tmp_path, "intel-rapl:2", 1_000_000_000)  # the whole machine
    for number, name in enumerate(("package-0", "package-1", "psys")):
        (tmp_path / f"intel-rapl:{number}" / "name").write_text(f"{name}\n")
    collector = RaplCollector(tmp_path)
    write_package(tmp_path, "intel-rapl:0", 2_000_000)
    write_package(tmp_path, "intel-rapl:1", 4_000_000)
    (family,) = collector.collect()
    assert {sample.labels["index"]: sample.value for sample in family.samples} == {"0": 3.0, "1": 3.0}
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()  # nobody but root may read it any more
    (family,) = collector.collect()
    assert {sample.labels["index"]: sample.value for sample in family.samples} == {"0": 3.0, "1": 3.0}
    assert not RaplCollector(tmp_path / "none").has_counters


def directory(kv: KeyValues, clock: VirtualClock) -> ExporterDirectory:
    return ExporterDirectory(lambda: kv, clock)


def test_a_port_is_known_while_it_is_announced_and_forgotten_later() -> None:
    kv, clock = KeyValues(), VirtualClock(1000.0)
    nodes, controller = directory(kv, VirtualClock(5.0)), directory(kv, clock)
    assert controller.ports() == {}
    nodes.announce("node-1", 9400)
    assert controller.ports() == {"node-1": 9400}, "the clocks of machines differ"
    clock.advance(119.0)
    assert controller.ports() == {"node-1": 9400}
    clock.advance(2.0)
    assert controller.ports() == {}
    clock.advance(3600.0)
    controller.ports()
    assert controller._entries.all() == {}


@pytest.mark.parametrize("body", [b"\xff", b"[]", b"{}", b'{"port": "80"}', b'{"port": 0}', b'{"port": 70000}'])
def test_an_entry_that_another_process_wrote_is_no_port(body: bytes) -> None:
    kv = KeyValues()
    made = directory(kv, VirtualClock(5.0))
    made._entries.put("node-1", body)
    assert made.ports() == {}


def test_an_announced_exporter_is_read_at_the_address_of_its_node_alone() -> None:
    exporter = "DCGM_FI_DEV_GPU_UTIL 30\nDCGM_FI_DEV_POWER_USAGE 200\nnode_rapl_package_joules_total 10\n"
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.url.host}:{request.url.port}")
        return httpx.Response(200, text=exporter if request.url.port == 9400 else AGENT)

    kv, clock = KeyValues(), VirtualClock(100.0)
    announced = directory(kv, clock)
    announced.announce("node-1", 9400)
    announced._entries.put("node-2", json.dumps({"port": 22, "host": "10.0.0.9"}).encode())
    agents = Agents({"node-1": AGENT})
    made = MeterReader(agents, clock, httpx.MockTransport(handle), directory=announced)  # type: ignore[arg-type]
    made.energy._watts_per_core = 10.0
    made._machines = (machine("node-1"), machine("node-2"))
    made.read_all()
    assert sorted(asked) == ["node-1:1", "node-1:9400"], "node-2 is not in Ray"
    assert made.exporter_of(machine("node-1")) == "node-1:9400"
    assert made.last_readings()["node-1"] == {"cpu": Signal(0.25, 100.0), "gpu": Signal(0.3, 100.0)}
    clock.advance(2.0)
    exporter = exporter.replace("joules_total 10", "joules_total 250")
    made.read_all()
    measured = made.measured()["node-1"]
    assert measured.power_w == {"nvml": 200.0, "rapl": 120.0}, "the counter stands in for the estimate"
    assert measured.joules == {"nvml": 400.0, "rapl": 240.0}


def test_a_driver_that_hangs_or_fails_does_not_hold_up_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    began, hang, ended = threading.Event(), threading.Event(), threading.Event()

    def broken(*_: str) -> int:
        began.set()
        hang.wait(300.0)
        ended.set()
        return 0

    monkeypatch.setattr(node, "start_exporter", broken)
    purchase = LocalMachine("node-1", "gpu", "a", 0, 0.0, 1, "127.0.0.1", {}, {}, "127.0.0.1:9", "")
    try:
        assert node.start_meter(NodeFolder(Path("none")), purchase) == ""
        assert began.wait(120.0)
        assert not ended.is_set(), "the node waited for it"
    finally:
        hang.set()
