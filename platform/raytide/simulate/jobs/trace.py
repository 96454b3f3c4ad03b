"""Recorded training jobs with submission time, duration, number of GPUs and team."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raytide.core.errors import DataError
from raytide.simulate import columns

DAY_S = 86400.0
SHORTEST_S, LONGEST_S = 30.0, 7 * DAY_S
MOST_GPUS = 64
_LATEST_S = 1e11
"""The latest time accepted, in seconds: three thousand years. Later times are in other units."""
COLUMNS = ("submit_s", "duration_s", "num_gpus", "vc")


@dataclass(frozen=True, slots=True, eq=False)
class JobTrace:
    """Recorded jobs in order of submission, one array per column."""

    submit_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    gpus: NDArray[np.int64]
    team: NDArray[np.int64]
    """The number of the job's team."""

    def __len__(self) -> int:
        return len(self.submit_s)

    @property
    def gpu_s(self) -> float:
        return float(self.duration_s @ self.gpus)

    def chosen(self, rows: NDArray[np.bool_] | slice) -> JobTrace:
        return JobTrace(self.submit_s[rows], self.duration_s[rows], self.gpus[rows], self.team[rows])


def read(path: Path) -> JobTrace:
    """Reads the jobs of a CSV file. Durations are clipped to 30 s .. 7 days, and sizes to 1 .. 64 GPUs."""
    table = columns.read(path, COLUMNS[:3], COLUMNS[3:])
    submit_s, duration_s, gpus = (table.numbers[name] for name in COLUMNS[:3])
    if (submit_s < 0).any() or (submit_s > _LATEST_S).any():
        raise DataError(f"{path}: submit_s is not within 0 and {_LATEST_S:g} s in each row.", hint="Correct the file.")
    if (gpus < 0).any():
        raise DataError(f"{path} has a negative number of GPUs.", hint="Correct the file.")
    teams = {name: number for number, name in enumerate(sorted(set(table.words["vc"])))}
    order = np.argsort(submit_s, kind="stable")
    return JobTrace(
        submit_s[order],
        np.clip(duration_s, SHORTEST_S, LONGEST_S)[order],
        np.clip(np.ceil(gpus), 1, MOST_GPUS).astype(np.int64)[order],
        np.array([teams[name] for name in table.words["vc"]])[order],
    )


def window(trace: JobTrace, first_day: int | None, days: int) -> JobTrace:
    """Returns the jobs that were submitted in `days` days from `first_day`, with times that start at 0.

    If `first_day` is None, the days with the most GPU-hours are chosen.
    """
    day = (trace.submit_s // DAY_S).astype(np.int64)
    if first_day is None:
        by_day = np.bincount(day, weights=trace.duration_s * trace.gpus)
        sums = np.convolve(by_day, np.ones(days), mode="valid") if len(by_day) > days else by_day[:1]
        first_day = int(sums.argmax())
    found = trace.chosen((day >= first_day) & (day < first_day + days))
    if not len(found):
        raise DataError(
            f"no job was submitted in {days} days from day {first_day}.",
            hint=f"The trace has days {day.min()} to {day.max()}.",
        )
    return replace(found, submit_s=found.submit_s - first_day * DAY_S)


def with_multi_gpu_share(trace: JobTrace, share: float, seed: int) -> JobTrace:
    """Raises the share of jobs with several GPUs to about `share`, and returns the changed trace. Gives several GPUs to
    one-GPU jobs that are chosen at random.
    """
    several = trace.gpus > 1
    now = several.mean()
    if share <= now or not several.any():
        return trace
    random = np.random.default_rng(seed)
    redrawn = ~several & (random.random(len(trace)) < (share - now) / (1 - now))
    gpus = trace.gpus.copy()
    gpus[redrawn] = random.choice(trace.gpus[several], size=int(redrawn.sum()))
    return replace(trace, gpus=gpus)


def gpus_for(trace: JobTrace, load: float, days: int) -> int:
    """Returns the cluster size in GPUs. With this size, the jobs' GPU-hours are `load` times the GPU-hours that the
    cluster has in `days` days. The size is rounded up to whole nodes of 8 GPUs, and is at least MOST_GPUS.
    """
    return max(MOST_GPUS, 8 * math.ceil(trace.gpu_s / (load * days * DAY_S) / 8))
