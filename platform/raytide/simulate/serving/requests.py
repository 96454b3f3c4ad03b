"""The requests of a simulation. The token counts and the gaps between arrivals come from a recording. The recording
starts over when it ends. The gaps are scaled so that the request rate follows an envelope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raytide.core.errors import DataError
from raytide.simulate import columns
from raytide.simulate.columns import Floats
from raytide.simulate.serving.setup import ServingSetup

LEAST_RATE = 0.05
"""The rate in the quietest hour, as a share of the peak."""

_MOST_HOURS = 100_000

_STEP_S = 60.0
"""The step in seconds at which the rate is evaluated. The rate is linear between the middles of hours."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a simulation in order of arrival.

    A replica prefills one request after another. A request occupies a slot from its prefill to its last token.
    """

    arrival_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    prefill_s: Floats
    decode_s: Floats

    @property
    def count(self) -> int:
        return len(self.arrival_s)

    def work_s(self, slots: int) -> Floats:
        """Returns the least number of replica-seconds that each request needs, whatever the schedule."""
        return np.maximum(self.prefill_s, (self.prefill_s + self.decode_s) / slots)


def workload(setup: ServingSetup) -> Workload:
    """Returns the requests of a simulation. The seed determines where in the recording they start."""
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
    """Returns times, prompt and output tokens in order of time."""
    table = columns.read(path, ("t_s", "prompt_tokens", "output_tokens")).numbers
    order = np.argsort(table["t_s"], kind="stable")
    at_s, prompt, output = (table[name][order] for name in ("t_s", "prompt_tokens", "output_tokens"))
    if at_s[-1] <= at_s[0]:
        raise DataError(
            f"{path} has all requests at one time.", hint="It needs two at different times: their gaps are repeated."
        )
    if (prompt < 0).any() or (output < 0).any():
        raise DataError(f"{path} has a negative number of tokens.", hint="Correct the file.")
    return at_s, prompt, output


def _envelope(setup: ServingSetup) -> Floats:
    """Returns each hour's rate as a share of the peak: the busiest whole days of the envelope, smoothed over 3 h."""
    hours = math.ceil(setup.horizon_s / 3600.0)
    if setup.envelope is None:
        return np.ones(hours)
    requests = _hourly(setup.envelope)
    padded = np.pad(requests, 1)
    near = np.minimum(np.arange(len(requests)), 1) + np.minimum(np.arange(len(requests))[::-1], 1) + 1
    smooth = np.convolve(padded, np.ones(3), mode="valid") / near
    starts = range(0, max(len(smooth) - hours, 0) + 1, 24)
    first = max(starts, key=lambda start: float(smooth[start : start + hours].sum()))
    chosen = np.resize(smooth[first:] if first else smooth, hours)
    if not chosen.any():
        raise DataError(
            f"{setup.envelope} has no requests in the hours to simulate.",
            hint="Give it more days, or leave out its first hours: a window begins with one of its days.",
        )
    shares: Floats = np.maximum(chosen / chosen.max(), LEAST_RATE)
    return shares


def _hourly(path: Path) -> Floats:
    """Returns requests by hour, from the first hour to the last; an hour without a row has none."""
    table = columns.read(path, ("hour", "requests")).numbers
    hour, requests = np.floor(table["hour"]), table["requests"]
    if len(np.unique(hour)) < len(hour):
        raise DataError(f"{path} has two rows for one hour.", hint="Number the hours on from day to day.")
    if hour.max() - hour.min() >= _MOST_HOURS:
        raise DataError(f"{path} spans more than {_MOST_HOURS} hours.", hint="Its column `hour` counts hours.")
    if (requests < 0).any() or not (requests > 0).any():
        raise DataError(f"{path} needs counts of requests, some above zero.", hint="Correct the file.")
    found = np.zeros(int(hour.max() - hour.min()) + 1)
    found[(hour - hour.min()).astype(int)] = requests
    return found
