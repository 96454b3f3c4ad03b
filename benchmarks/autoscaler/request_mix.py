"""Makes a stand-in for recorded conversations, for autoscaler_serving.py --requests.

The number of requests and the mean numbers of tokens are those published for the Azure conversation trace of 2023.
The request rate varies by about a fifth from minute to minute.

    benchmarks/autoscaler/request_mix.py mix.csv
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

REQUESTS, RPS = 19_366, 5.55
WANDER, KEPT = 0.2, 0.8
"""The spread of the logarithm of the rate, and the share of a deviation that is left a minute later."""
PROMPT, OUTPUT = (1155.0, 900.0, 14_050), (211.0, 140.0, 1500)
"""Mean and median of a lognormal distribution, and the most tokens."""

Floats = NDArray[np.float64]


def tokens(rng: np.random.Generator, mean: float, median: float, most: int) -> Floats:
    spread = np.sqrt(2.0 * np.log(mean / median))
    return rng.lognormal(np.log(median), spread, REQUESTS).clip(1, most)


def arrivals_s(rng: np.random.Generator) -> Floats:
    gaps_s = rng.exponential(1.0 / RPS, REQUESTS)
    minutes = REQUESTS // round(60 * RPS) + 2
    log_rate = np.zeros(minutes)
    for minute in range(1, minutes):
        log_rate[minute] = KEPT * log_rate[minute - 1] + np.sqrt(1.0 - KEPT**2) * rng.normal()
    rate = np.exp(WANDER * log_rate - WANDER**2 / 2)
    gaps_s /= np.interp(np.arange(REQUESTS) / (60 * RPS), np.arange(minutes), rate)
    return np.cumsum(gaps_s) - gaps_s[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=12)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    columns = arrivals_s(rng), tokens(rng, *PROMPT), tokens(rng, *OUTPUT)
    with args.file.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("t_s", "prompt_tokens", "output_tokens"))
        writer.writerows(
            (f"{at_s:.3f}", int(prompt), int(output)) for at_s, prompt, output in zip(*columns, strict=True)
        )


if __name__ == "__main__":
    main()
