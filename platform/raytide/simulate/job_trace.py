"""Recorded training jobs: when each was submitted, how long it ran on how many GPUs, and whose it was."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raytide.core.errors import DataError

DAY_S = 86400.0
SHORTEST_S, LONGEST_S = 30.0, 7 * DAY_S
MOST_GPUS = 64
COLUMNS = ("submit_s", "duration_s", "num_gpus", "vc")


@dataclass(frozen=True, slots=True, eq=False)
class JobTrace:
    """Jobs in order of submission, one array for each column."""

    submit_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    gpus: NDArray[np.int64]
    team: NDArray[np.int64]
    """The number of its team."""

    def __len__(self) -> int:
        return len(self.submit_s)

    @property
    def gpu_s(self) -> float:
        return float(self.duration_s @ self.gpus)

    def chosen(self, rows: NDArray[np.bool_] | slice) -> JobTrace:
        return JobTrace(self.submit_s[rows], self.duration_s[rows], self.gpus[rows], self.team[rows])


def read(path: Path) -> JobTrace:
    """The jobs of a CSV file, durations clipped to 30 s .. 7 days and sizes to 64 GPUs."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from None
    if not rows or (missing := [name for name in COLUMNS if name not in rows[0]]):
        what = f"no column {', '.join(missing)}" if rows else "no jobs"
        raise DataError(f"{path}: {what}.", hint=f"It needs the columns {', '.join(COLUMNS)}.")
    submit_s, duration_s, gpus = (_numbers(path, rows, name) for name in COLUMNS[:3])
    teams = {name: number for number, name in enumerate(sorted({row["vc"] for row in rows}))}
    order = np.argsort(submit_s, kind="stable")
    return JobTrace(
        submit_s[order],
        np.clip(duration_s, SHORTEST_S, LONGEST_S)[order],
        np.clip(gpus, 1, MOST_GPUS).astype(np.int64)[order],
        np.array([teams[row["vc"]] for row in rows])[order],
    )


def window(trace: JobTrace, first_day: int | None, days: int) -> JobTrace:
    """The jobs submitted in those days, from time 0; the days with the most GPU-hours when no first one is given."""
    day = (trace.submit_s // DAY_S).astype(np.int64)
    if first_day is None:
        by_day = np.bincount(day, weights=trace.duration_s * trace.gpus)
        sums = np.convolve(by_day, np.ones(days), mode="valid") if len(by_day) > days else by_day[:1]
        first_day = int(sums.argmax())
    found = trace.chosen((day >= first_day) & (day < first_day + days))
    if not len(found):
        raise DataError(f"no job was submitted in {days} days from day {first_day}.", hint="Choose another day.")
    return replace(found, submit_s=found.submit_s - first_day * DAY_S)


def with_multi_gpu_share(trace: JobTrace, share: float, seed: int) -> JobTrace:
    """Jobs of one GPU redrawn from the sizes of the others until about this share has several."""
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
    """The cluster on which the jobs' GPU-hours are `load` times what it has in those days, in whole nodes of 8."""
    return max(MOST_GPUS, 8 * math.ceil(trace.gpu_s / (load * days * DAY_S) / 8))


def _numbers(path: Path, rows: Sequence[dict[str, str]], name: str) -> NDArray[np.float64]:
    try:
        return np.array([float(row[name]) for row in rows])
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: {name}: {error}.", hint="It has to be a number in each row.") from None
