"""The fake GPU exporter of local nodes: a page over HTTP that the scraper reads as if it were Ray's agent's."""

from __future__ import annotations

from pathlib import Path

import httpx

from raytide.autoscaler.nodes.node_page import meters_of, read_page
from raytide.autoscaler.providers.local.files import LocalMachine, NodeFolder
from raytide.autoscaler.providers.local.meter import GpuSettings, _Gpus, set_gpu, set_use, start_meter
from raytide.core.objects.node import ACCELERATOR_LABEL, Signal
from raytide.core.telemetry.catalogue import declared_in
from raytide.core.telemetry.catalogue import gpu as dcgm


def test_it_says_what_it_was_told_for_each_gpu_and_is_silent_when_told_so(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "nodes" / "node-1")
    folder.path.mkdir(parents=True)
    purchase = LocalMachine("node-1", "gpu8", "a", 1, 0.0, 2, "127.0.62.2", {"GPU": 8.0}, {}, "", "")
    address = start_meter(folder, purchase)
    assert address.startswith("127.0.62.2:")

    def page() -> str:
        return httpx.get(f"http://{address}/metrics").raise_for_status().text

    assert page().count("GpuIndex=") == 8
    assert shown_names(page()) == {metric.name for metric in declared_in(dcgm)}
    assert meters_of(read_page(page(), 3.0)) == {"gpu": Signal(0.0, 3.0)}
    set_use(tmp_path, "node-1", gpu=0.97)
    assert meters_of(read_page(page(), 4.0)) == {"gpu": Signal(0.97, 4.0)}
    set_use(tmp_path, "node-1", gpu=None)
    assert meters_of(read_page(page(), 5.0)) == {}


def test_it_has_dcgm_s_names_labels_and_faults(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "nodes" / "node-1")
    folder.path.mkdir(parents=True)
    purchase = LocalMachine(
        "node-1", "gpu2", "a", 1, 0.0, 2, "127.0.62.3", {"GPU": 2.0}, {ACCELERATOR_LABEL: "H100"}, "", ""
    )
    clock = [100.0]
    exporter = _Gpus(folder, purchase, lambda: clock[0])

    def values() -> dict[str, float]:
        found = {}
        for family in exporter.collect():
            for sample in family.samples:
                if family.name.startswith("DCGM_") and sample.labels["gpu"] == "1":
                    assert sample.labels == {
                        "gpu": "1", "UUID": "GPU-node-1-1", "modelName": "H100", "Hostname": "node-1", "node": "node-1",
                    }  # fmt: skip
                    found[sample.name.removeprefix("DCGM_FI_DEV_")] = sample.value
        return found

    assert (values()["POWER_USAGE"], values()["GPU_TEMP"], values()["XID_ERRORS"]) == (60.0, 35.0, 0.0)
    set_use(tmp_path, "node-1", gpu=1.0)
    assert (values()["POWER_USAGE"], values()["GPU_TEMP"], values()["GPU_UTIL"]) == (400.0, 70.0, 100.0)
    set_gpu(tmp_path, "node-1", GpuSettings(temperature_c=93.0, power_w=250.0, xid=79, ecc_errors=3, remap_failed=True))
    found = values()
    names = ("GPU_TEMP", "POWER_USAGE", "XID_ERRORS", "ECC_DBE_VOL_TOTAL", "ROW_REMAP_FAILURE")
    assert [found[name] for name in names] == [
        93.0, 250.0, 79.0, 3.0, 1.0,
    ]  # fmt: skip
    clock[0] += 10.0
    assert values()["TOTAL_ENERGY_CONSUMPTION"] - found["TOTAL_ENERGY_CONSUMPTION"] == 250.0 * 10.0 * 1000.0
    set_use(tmp_path, "node-1", gpu=None)
    assert values() == {}


def shown_names(page: str) -> set[str]:
    return {line.split("{")[0] for line in page.splitlines() if line.startswith(("DCGM_", "raytide_"))}
