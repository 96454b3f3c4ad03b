"""Loads made from a recording: thinned, scaled, with bursts; the worst hour of a run, and what whole nodes cost."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from raytide.simulate.serving.compare import Scenario
from raytide.simulate.serving.setup import ServingSetup

FOLDER = Path(__file__).parents[2] / "benchmarks" / "autoscaler"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loads() -> ModuleType:
    return loaded("serving_load")


def recorded() -> np.ndarray:
    at_s = np.arange(3600.0)
    return np.stack((at_s, np.full(3600, 1000.0), np.full(3600, 10.0)), axis=1)


def test_copies_are_thinned_and_tokens_scaled_over_the_whole_time(loads: ModuleType) -> None:
    load = loads.Load(keep=0.25, copies=4, prompts=0.5, outputs=3, hours=5)
    rows = load.requests(recorded(), np.random.default_rng(0))
    assert len(rows) == pytest.approx(5 * 3600, rel=0.05)
    assert 0 <= rows[0, 0] < 60 and 5 * 3600 - 60 < rows[-1, 0] < 5 * 3600
    assert (np.diff(rows[:, 0]) >= 0).all()
    assert set(rows[:, 1]) == {500.0} and set(rows[:, 2]) == {30.0}


def test_bursts_multiply_the_rate_for_their_time_only(loads: ModuleType) -> None:
    load = loads.Load(bursts_per_day=12, burst=3, burst_s=600, hours=24)
    rows = load.requests(recorded(), np.random.default_rng(1))
    by_minute = np.bincount((rows[:, 0] // 60).astype(int), minlength=1440)
    assert np.median(by_minute) == 60
    assert 30 <= (by_minute > 120).sum() <= 12 * 11 * 2


def test_recordings_of_both_formats_are_read(loads: ModuleType, tmp_path: Path) -> None:
    late = '{"timestamp": 5000, "input_length": 7, "output_length": 2}'
    lines = late + '\n{"timestamp": 1000, "input_length": 3, "output_length": 1}\n'
    (tmp_path / "r.jsonl").write_text(lines)
    rows = loads.read(tmp_path / "r.jsonl")
    assert rows.tolist() == [[0.0, 3.0, 1.0], [4.0, 7.0, 2.0]]
    loads.write(tmp_path / "r.csv", rows)
    assert loads.read(tmp_path / "r.csv").tolist() == rows.tolist()


def test_the_worst_hour_has_no_larger_share_in_time_than_the_whole(setup: ServingSetup) -> None:
    result = Scenario.of(setup).run("spot-naive")
    assert 0 <= result.worst_hour_attainment <= result.slo_attainment < 1
    assert 0 <= result.worst_hour < setup.horizon_s / 3600


def test_no_policy_costs_less_than_the_floor_of_whole_nodes(setup: ServingSetup) -> None:
    stage = Scenario.of(setup)
    floor = loaded("serving_floor").WholeNodeFloor(stage)
    low, high = floor.usd(0.9), floor.usd(0.999)
    assert 0 < low < high
    for name in ("raytide", "serve-ondemand"):
        result = stage.run(name)
        assert floor.usd(result.slo_attainment) < result.cost_usd
    sizes = floor.sizes(0.99)
    assert len(sizes) == 144 and max(sizes) <= setup.max_replicas
