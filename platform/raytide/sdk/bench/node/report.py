"""The measured figures of a node type, and the `speed` that is computed from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import geometric_mean, median
from typing import Any

from raytide.core.errors import DataError
from raytide.core.io import html
from raytide.sdk.bench.node.measure import MARK

_UNITS = (("memory", 1e9, "GB/s"), ("gemm", 1e12, "TFLOP/s"), ("all_reduce", 1e9, "GB/s"), ("disk", 1e9, "GB/s"))
_ROUNDING = 3


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The measured figures of the nodes of one type. `nodes` contains one mapping from figure to value for each
    node.
    """

    node_type: str
    job: str
    nodes: tuple[Mapping[str, float], ...]

    def median(self, figure: str) -> float:
        return median(node[figure] for node in self.nodes)

    @property
    def figures(self) -> list[str]:
        return list(self.nodes[0])

    @property
    def work_rates(self) -> tuple[float, float]:
        """The two rates that limit decoding and training: the memory bandwidth in bytes per second, and the FLOP/s of
        the fastest matrix product in a 16-bit dtype. If no 16-bit dtype was measured, any dtype counts.
        """
        products = [name for name in self.figures if name.startswith("gemm_")]
        short = [name for name in products if "16" in name] or products
        return self.median("memory_bytes_per_s"), max(self.median(name) for name in short)

    def speed(self, reference: NodeReport) -> float:
        """Returns the `speed` of this node type relative to a reference type: the geometric mean of the ratios of their
        `work_rates`.
        """
        ratios = [mine / theirs for mine, theirs in zip(self.work_rates, reference.work_rates, strict=True)]
        return round(geometric_mean(ratios), _ROUNDING)

    def json(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, ...]]:
        """Returns one row for each figure: its name, the median, smallest and largest value over the nodes, and the
        unit.
        """
        found = []
        for figure in self.figures:
            scale, unit = next((scale, unit) for prefix, scale, unit in _UNITS if figure.startswith(prefix))
            name = figure.removesuffix("_bytes_per_s").removesuffix("_flops").replace("_", " ")
            values = [node[figure] / scale for node in self.nodes]
            found.append((name, *(f"{value:,.3f}" for value in (median(values), min(values), max(values))), unit))
        return found

    def _repr_html_(self) -> str:
        columns = ("figure", "median", "least", "greatest", "unit")
        return html.framed(html.table(f"{self.node_type}, {len(self.nodes)} nodes", columns, self.rows()))


def parse_report(node_type: str, job: str, log: str, nodes: int) -> NodeReport:
    """Reads the figures of all members from a job's log and returns them as a report. `nodes` is the number of members.
    Raises DataError if the figures of a member are missing.
    """
    found: dict[int, Mapping[str, float]] = {}
    for line in log.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            body = json.loads(text)
            found[int(body["rank"])] = body["figures"]
    if len(found) < nodes:
        raise DataError(
            f"{len(found)} of {nodes} nodes printed their figures.", hint=f"`raytide logs {job}` shows what they did."
        )
    return NodeReport(node_type, job, tuple(figures for _, figures in sorted(found.items())))


def yaml_line(speed: float, reference: str) -> str:
    """Returns the line for cluster.yaml that sets the node type's `speed`."""
    return f"speed: {speed:g}  # relative to {reference}, measured by `raytide bench node`"
