"""The requests of a simulation: recorded gaps and token counts, repeated, at a rate that follows an envelope."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raytide.core.errors import DataError
from raytide.simulate.serving_setup import ServingSetup

Floats = NDArray[np.float64]

LEAST_RATE = 0.05
"""The quietest hour, as a share of the peak."""

_STEP_S = 60.0
"""The rate moves in a line from the middle of one hour to that of the next, in steps of this size."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival. A replica prefills one after another; a slot is held from prefill to the last token."""

    arrival_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    prefill_s: Floats
    decode_s: Floats

    @property
    def count(self) -> int:
        return len(self.arrival_s)

    def work_s(self, slots: int) -> Floats:
        """Replica-seconds that no schedule can avoid for each request."""
        return np.maximum(self.prefill_s, (self.prefill_s + self.decode_s) / slots)


def workload(setup: ServingSetup) -> Workload:
    """The seed chooses where in the recording the first request is taken from."""
    at_s, prompt, output = _recording(setup.requests)
    gaps = np.diff(at_s, prepend=0.0)
    gaps[0] = gaps[1:].mean()
    gaps /= gaps.mean()
    turn = int(np.random.default_rng([setup.seed, 1]).integers(len(gaps)))
    rates = setup.peak_rps * _envelope(setup)
    edges_s = np.append(np.arange(0.0, setup.horizon_s, _STEP_S), setup.horizon_s)
    middles_h = (edges_s[:-1] + np.diff(edges_s) / 2) / 3600.0
    per_s = np.interp(middles_h, np.arange(len(rates)) + 0.5, rates)
    expected = np.concatenate(([0.0], np.cumsum(per_s * np.diff(edges_s))))
    repeats = math.ceil(expected[-1] / len(gaps)) + 1
    due = np.cumsum(np.tile(np.roll(gaps, -turn), repeats))
    count = int(np.searchsorted(due, expected[-1]))
    if count == 0:
        raise DataError("no request falls into the simulated days.", hint="Raise peak_rps or days.")
    prompt, output = (np.tile(np.roll(tokens, -turn), repeats)[:count] for tokens in (prompt, output))
    return Workload(
        arrival_s=np.interp(due[:count], expected, edges_s),
        prompt_tokens=prompt,
        output_tokens=output,
        prefill_s=prompt / setup.prefill_tps,
        decode_s=output * setup.tpot_ms / 1000.0,
    )


def _recording(path: Path) -> tuple[Floats, Floats, Floats]:
    table = _columns(path, ("t_s", "prompt_tokens", "output_tokens"))
    at_s, prompt, output = table["t_s"], table["prompt_tokens"], table["output_tokens"]
    if len(at_s) < 2 or at_s[-1] <= at_s[0]:
        raise DataError(f"{path} needs at least two requests at different times.")
    if (np.diff(at_s) < 0).any():
        raise DataError(f"{path}: t_s goes backwards.", hint="Sort the requests by time.")
    if (prompt < 0).any() or (output < 0).any():
        raise DataError(f"{path} has a negative number of tokens.")
    return at_s, prompt, output


def _envelope(setup: ServingSetup) -> Floats:
    """The rate of each hour as a share of the peak: the busiest whole days of the envelope, smoothed over 3 h."""
    hours = math.ceil(setup.horizon_s / 3600.0)
    if setup.envelope is None:
        return np.ones(hours)
    requests = _columns(setup.envelope, ("hour", "requests"))["requests"]
    if (requests < 0).any() or not (requests > 0).any():
        raise DataError(f"{setup.envelope} needs counts of requests, some above zero.")
    padded = np.pad(requests, 1)
    near = np.minimum(np.arange(len(requests)), 1) + np.minimum(np.arange(len(requests))[::-1], 1) + 1
    smooth = np.convolve(padded, np.ones(3), mode="valid") / near
    starts = range(0, max(len(smooth) - hours, 0) + 1, 24)
    first = max(starts, key=lambda start: float(smooth[start : start + hours].sum()))
    chosen = np.resize(smooth[first:] if first else smooth, hours)
    shares: Floats = np.maximum(chosen / chosen.max(), LEAST_RATE)
    return shares


def _columns(path: Path, names: tuple[str, ...]) -> dict[str, Floats]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in names if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{path} has no column {', '.join(missing)}.", hint=f"It needs {', '.join(names)}.")
            rows = [[_number(row[name], path, reader.line_num, name) for name in names] for row in reader]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text file.") from None
    if not rows:
        raise DataError(f"{path} has no rows.")
    return dict(zip(names, np.array(rows).T, strict=True))


def _number(text: str | None, path: Path, line: int, name: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}, line {line}: {name} is {text!r}, not a number.")
    return value
