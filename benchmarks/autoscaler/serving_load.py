"""Makes a smoother load from a recording of requests, so that simulated endpoints can meet strict SLOs under it.

    benchmarks/autoscaler/serving_load.py recording.csv load.csv --keep 0.5 --copies 4
                                          --prompts 0.3 --bursts-per-day 8

The result is a recording for `raytide simulate serving`. It is the sum of several copies of the original, which
stand for more users of the same kind. Each copy begins at a random place of the original and keeps a random part of
its requests. The sum is therefore smoother than the original. Token counts are multiplied by factors, to imitate
other models and GPUs. Bursts multiply the request rate for some minutes. Recordings are CSV files with t_s,
prompt_tokens and output_tokens, or JSON lines with timestamp (ms), input_length and output_length.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raytide.simulate import columns

Floats = NDArray[np.float64]
COLUMNS = ("t_s", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Load:
    """The changes that turn a recording of requests into the load of a benchmark."""

    keep: float = 1.0
    """The share of each copy's requests that is kept."""
    copies: int = 1
    prompts: float = 1.0
    """The factor on prompt tokens."""
    outputs: float = 1.0
    """The factor on output tokens."""
    most_prompt: float = 4000.0
    """Longer prompts are cut, so that no prompt is late by its length alone."""
    bursts_per_day: float = 0.0
    burst: float = 2.0
    """The factor on the rate in a burst."""
    burst_s: float = 600.0
    hours: float = 24.0

    def requests(self, recorded: Floats, rng: np.random.Generator) -> Floats:
        """Returns the load that these changes make from the recording `recorded`. The rows of both are (time, prompt
        tokens, output tokens), in order of time.
        """
        whole_s = self.hours * 3600.0
        parts = [self._copy(recorded, whole_s, rng) for _ in range(self.copies)]
        rows = np.concatenate(parts)
        rows = self._with_bursts(rows[np.argsort(rows[:, 0], kind="stable")], whole_s, rng)
        rows[:, 1] = np.clip(np.ceil(rows[:, 1] * self.prompts), 1, self.most_prompt)
        rows[:, 2] = np.maximum(np.ceil(rows[:, 2] * self.outputs), 1)
        return rows

    def _copy(self, recorded: Floats, whole_s: float, rng: np.random.Generator) -> Floats:
        """Returns a thinned copy, repeated from a random start until it fills the time."""
        length_s = recorded[-1, 0] + recorded[-1, 0] / len(recorded)
        first_s = rng.uniform(0.0, length_s)
        rounds = int(np.ceil(whole_s / length_s)) + 1
        rows = np.tile(recorded, (rounds, 1))
        rows[:, 0] += np.repeat(np.arange(rounds), len(recorded)) * length_s - first_s
        return rows[(rows[:, 0] >= 0) & (rows[:, 0] < whole_s) & (rng.random(len(rows)) < self.keep)]

    def _with_bursts(self, rows: Floats, whole_s: float, rng: np.random.Generator) -> Floats:
        """Returns the rows with more of them within bursts: copies of requests near by, at times of their own."""
        count = rng.poisson(self.bursts_per_day * whole_s / 86400.0)
        added = []
        for start_s in np.sort(rng.uniform(0.0, whole_s - self.burst_s, count)):
            inside = rows[(rows[:, 0] >= start_s) & (rows[:, 0] < start_s + self.burst_s)]
            many = rng.poisson(len(inside) * (self.burst - 1.0)) if len(inside) else 0
            more = inside[rng.integers(max(len(inside), 1), size=many)].copy()
            more[:, 0] = rng.uniform(start_s, start_s + self.burst_s, many)
            added.append(more)
        rows = np.concatenate((rows, *added))
        return rows[np.argsort(rows[:, 0], kind="stable")]


def read(path: Path) -> Floats:
    """Returns the rows (time, prompt tokens, output tokens) of a recording, in order of time. Times are relative to the
    first request.
    """
    if path.suffix == ".jsonl":
        entries = [json.loads(line) for line in path.read_text().splitlines() if line]
        rows = np.array([(e["timestamp"] / 1000.0, e["input_length"], e["output_length"]) for e in entries])
    else:
        table = columns.read(path, COLUMNS).numbers
        rows = np.stack([table[name] for name in COLUMNS], axis=1)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    rows[:, 0] -= rows[0, 0]
    return rows


def write(path: Path, rows: Floats) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((f"{at_s:.3f}", int(prompt), int(output)) for at_s, prompt, output in rows.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("file", type=Path)
    for name in ("keep", "prompts", "outputs", "most_prompt", "bursts_per_day", "burst", "burst_s", "hours"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Load(), name))
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    recording, file, seed = args.pop("recording"), args.pop("file"), args.pop("seed")
    write(file, Load(**args).requests(read(recording), np.random.default_rng(seed)))


if __name__ == "__main__":
    main()
