"""Figures of nodes, the speed that follows from them, and the job that measures them."""

from __future__ import annotations

import json
from statistics import geometric_mean
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.cli.serving import node_job
from raytide.cli.serving.node_job import job_of
from raytide.core.errors import DataError
from raytide.core.objects.job import JobSpec
from raytide.core.objects.node import TYPE_LABEL, NodeType
from raytide.sdk.bench.node import measure
from raytide.sdk.bench.node.measure import MARK
from raytide.sdk.bench.node.report import NodeReport, parse_report, yaml_line
from raytide.sdk.jobs.job_run import Run

RATES = st.floats(1e6, 1e15)


def report(memory: float = 1e10, gemm: float = 1e12, **more: float) -> NodeReport:
    return NodeReport("l4", "job-1", ({"memory_bytes_per_s": memory, "gemm_bfloat16_flops": gemm, **more},))


@given(RATES, RATES, RATES, RATES)
def test_speeds_are_ratios(memory: float, gemm: float, other_memory: float, other_gemm: float) -> None:
    mine, other = report(memory, gemm), report(other_memory, other_gemm)
    assert mine.speed(mine) == 1.0
    expected = geometric_mean([memory / other_memory, gemm / other_gemm])
    assert mine.speed(other) == pytest.approx(expected, rel=1e-6, abs=6e-4)


def test_the_product_of_16_bits_counts_where_there_is_one() -> None:
    assert report(gemm=3.0, gemm_float16_flops=5.0, gemm_float32_flops=9.0).work_rates[1] == 5.0
    only = NodeReport("cpu", "job-1", ({"memory_bytes_per_s": 1.0, "gemm_float32_flops": 9.0},))
    assert only.work_rates[1] == 9.0


def test_every_member_s_line_is_read_from_the_log() -> None:
    lines = [f"[{rank}] {MARK}{json.dumps({'rank': rank, 'figures': {'memory_bytes_per_s': rank}})}" for rank in (1, 0)]
    found = parse_report("l4", "job-1", "\n".join(["starting", *lines, "bye"]), 2)
    assert [node["memory_bytes_per_s"] for node in found.nodes] == [0, 1]
    with pytest.raises(DataError, match="2 of 3 nodes"):
        parse_report("l4", "job-1", "\n".join(lines), 3)


def test_a_table_has_units_and_the_bounds_over_the_nodes() -> None:
    nodes = tuple({"memory_bytes_per_s": rate, "disk_read_bytes_per_s": 2e9} for rate in (1e9, 3e9, 2e9))
    found = NodeReport("l4", "job-1", nodes)
    assert found.rows()[0] == ("memory", "2.000", "1.000", "3.000", "GB/s")
    assert found.rows()[1][0] == "disk read"
    assert "<td>3.000</td>" in found._repr_html_()
    assert yaml_line(1.8, "cpu").startswith("speed: 1.8  # relative to cpu")


def test_the_job_takes_whole_nodes_of_the_type() -> None:
    resources = {"CPU": 8.0, "GPU": 2.0, "memory": 1e9}
    spec = job_of(NodeType(name="l4x2", resources=resources, price_micro_usd_h=1), 3, 0.5, 64)
    (shape,) = spec.gang.shapes
    assert (shape.members, dict(shape.resources)) == (3, {"CPU": 8.0, "GPU": 2.0})
    assert shape.labels == {TYPE_LABEL: "l4x2"}
    assert spec.config["command"] == ["python", "-m", "raytide.sdk.bench.node.measure", "0.5", "64"]


def test_a_measurement_prints_every_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "_VECTOR", 2**10)
    monkeypatch.setitem(measure._MATRIX, "cpu", 32)
    monkeypatch.setattr("sys.argv", ["measure", "0", "1"])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    measure.main()
    (node,) = parse_report("here", "job-1", capsys.readouterr().out, 1).nodes
    names = {"memory_bytes_per_s", "disk_write_bytes_per_s", "disk_read_bytes_per_s"}
    assert names | {"gemm_float32_flops", "gemm_bfloat16_flops"} <= node.keys()
    assert all(rate > 0 for rate in node.values())


def test_an_interrupt_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        stopped: ClassVar[list[str]] = []

        def snapshot(self) -> SimpleNamespace:
            return SimpleNamespace(node_types=(NodeType(name="l4", resources={"CPU": 8.0}, price_micro_usd_h=1),))

        def submit(self, spec: JobSpec) -> SimpleNamespace:
            return SimpleNamespace(job=SimpleNamespace(id="job-7", spec=spec))

        def stop(self, job_id: str) -> None:
            self.stopped.append(job_id)

    def interrupted(run: Run, *, timeout_s: float) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        node_job.measure(SimpleNamespace(client=Api()), "l4")  # type: ignore[arg-type]
    assert Api.stopped == ["job-7"]
