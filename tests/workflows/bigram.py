"""A small model that learns fast: the next byte by the last one, by SGD on the text of this file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

EVERY = 5


def losses(rate: float, momentum: float, steps: int) -> Iterator[tuple[int, float]]:
    """Yields (step, loss in nats on held-out pairs) every few steps. It is a function of its arguments."""
    text = np.frombuffer(Path(__file__).read_bytes(), dtype=np.uint8) % 128
    cut = len(text) * 3 // 4
    weights, velocity, draw = np.zeros((128, 128)), np.zeros((128, 128)), np.random.default_rng(0)
    for step in range(1, steps + 1):
        at = draw.integers(0, cut - 1, size=256)
        before, after = text[at], text[at + 1]
        gradient = np.zeros_like(weights)
        chance = softmax(weights[before])
        chance[np.arange(len(at)), after] -= 1.0
        np.add.at(gradient, before, chance / len(at))
        velocity = momentum * velocity + gradient
        weights -= rate * velocity
        if step % EVERY == 0:
            chance = softmax(weights[text[cut:-1]])
            yield step, float(-np.log(chance[np.arange(len(chance)), text[cut + 1 :]] + 1e-12).mean())


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    import raytide as rt

    parser = argparse.ArgumentParser()
    for name in ("rate", "momentum", "step_s"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    for at, value in losses(given.rate, given.momentum, given.steps):
        time.sleep(EVERY * given.step_s)  # the pace of a larger model
        rt.report(step=at, loss=value)
