"""The side-by-side with Ray's own scheduler, small: both seat everything, and neither costs less than is possible."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "autoscaler" / "autoscaler_packing.py"

PRICES = """instance_type,gpu,gpus,vcpus,mem_gib,ondemand_usd_h
small,T4,1,8,32,0.5
small,T4,1,8,32,0.6
large,A100,8,96,768,22.0
half,L4,0.5,8,32,0.3
"""
PODS = """cpu_milli,memory_mib,num_gpu,gpu_milli
4000,8192,1,1000
2000,4096,1,460
32000,65536,4,1000
8000,8192,0,0
900000,8192,1,1000
"""


@pytest.fixture(scope="module")
def packing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("autoscaler_packing", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["autoscaler_packing"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_seat_all_work_and_no_fleet_costs_less_than_the_bound(packing: ModuleType, tmp_path: Path) -> None:
    prices, pods = tmp_path / "prices.csv", tmp_path / "pods.csv"
    prices.write_text(PRICES)
    pods.write_text(PODS)
    types = packing.menu(prices)
    assert {t.name: t.price_micro_usd_h for t in types} == {"small": 500_000, "large": 22_000_000}
    known = packing.shapes(pods, types)
    assert sorted(need["GPU"] for need in known) == [0.5, 1.0, 4.0]
    for seed in range(3):
        work = packing.draw(known, 15, random.Random(seed))
        assert work.groups
        rays, ours = packing.by_ray(types, work), packing.by_raytide(types, work)
        assert (rays.unmet, ours.unmet) == (0, 0)
        assert packing.bound_usd_h(types, work) <= ours.usd_h(types) * (1 + 1e-9)
        assert ours.usd_h(types) <= rays.usd_h(types)


def test_bundles_that_must_be_apart_cost_both_a_node_each(packing: ModuleType) -> None:
    types = (packing.NodeType(name="large", resources={"CPU": 96.0, "GPU": 8.0}, price_micro_usd_h=1, max_nodes=9),)
    bundles = {apart: packing.Demand({"CPU": 1.0, "GPU": 1.0}, count=3, apart=apart) for apart in ("", "group")}
    for apart, nodes in (("", 1), ("group", 3)):
        work = packing.Work((bundles[apart],), ())
        assert [side(types, work).nodes.total() for side in (packing.by_ray, packing.by_raytide)] == [nodes, nodes]
