"""Corrects the planner's estimates with measured runs. Learns two factors for each kind of device: one on compute time
(the pace), and one on the memory of activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from raytide.sizing.devices import Accelerator
from raytide.sizing.memory.estimate import Hardware, estimate
from raytide.sizing.step_time import step_time
from raytide.sizing.workload import Strategy, TrainWorkload

_LEAST, _MOST = 0.2, 20.0
"""The bounds of plausible corrections. A correction beyond them means that the run measured something else."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run on known devices, with its median step time and its peak memory."""

    workload: TrainWorkload
    strategy: Strategy
    device: Accelerator
    devices_per_node: int
    step_s: float
    peak_bytes: float | None = None
    """The bytes allocated on one device at the peak; None if they were not measured."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """The learned correction factors, by device name."""

    pace: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)

    def apply(self, device: Accelerator) -> Accelerator:
        """Returns a copy of the device with the learned factors for its pace and its memory. A factor that was not
        learned keeps its value.
        """
        return replace(
            device,
            pace=self.pace.get(device.name, device.pace),
            memory_scale=self.memory.get(device.name, device.memory_scale),
        )


def learn(runs: Iterable[MeasuredRun]) -> Corrections:
    """Returns the learned factors: for each kind of device, the median pace and the median memory factor of its runs.

    The pace of a run is the factor on compute time that makes the predicted step time equal to the measured one.
    Collectives and other parts of the step time do not depend on the pace. Implausible factors are left out.
    """
    paces: dict[str, list[float]] = defaultdict(list)
    scales: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if (pace := solve_pace(run)) is not None:
            paces[run.device.name].append(pace)
        if (scale := _memory_scale(run)) is not None:
            scales[run.device.name].append(scale)
    return Corrections(
        {name: median(found) for name, found in paces.items()},
        {name: median(found) for name, found in scales.items()},
    )


def solve_pace(run: MeasuredRun) -> float | None:
    """Returns the pace that makes the predicted step time equal to the measured one. Returns None if no pace between
    0.2 and 20 does so.
    """

    def predicted(pace: float) -> float:
        device = replace(run.device, pace=pace)
        return step_time(run.workload, run.strategy, device, run.devices_per_node).total

    low, high = _LEAST, _MOST
    if not predicted(low) <= run.step_s <= predicted(high):
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < run.step_s else (low, middle)
    return (low + high) / 2


def _memory_scale(run: MeasuredRun) -> float | None:
    """Returns the factor on predicted activations that explains the measured peak; None if the states alone exceed the
    peak.
    """
    if run.peak_bytes is None or run.device.is_cpu:
        return None
    found = estimate(run.workload, run.strategy, Hardware(0.0, fragmentation=0.0, context_bytes=0.0))
    activations = found.terms["activations"]
    rest = found.peak - activations
    if activations <= 0 or run.peak_bytes <= rest:
        return None
    scale = (run.peak_bytes - rest) / activations
    return scale if _LEAST < scale < _MOST else None
