"""Ten thousand random requests through the real engine, many of them aborted: nothing leaks and memory stays flat.

SOAK_SEED sets the seed, which is printed with a failure.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from pathlib import Path

import psutil
import pytest
from tests.actors.engine.tiny import VOCAB

from raytide.actors.engine import EngineConfig, GenRequest, SamplingParams
from raytide.actors.engine.backends.native.engine_core import EngineCore

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

REQUESTS = 10_000
SEED = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(10_000))
WARM = 2_000
"""Requests after which allocators and caches have grown to their size."""
MOST_MB = 16


def test_ten_thousand_requests_leave_nothing_behind(model_dir: Path) -> None:
    sys.stdout.write(f"seed {SEED} (SOAK_SEED)\n")
    rng = random.Random(SEED)
    config = EngineConfig(
        model_dir=str(model_dir), num_blocks=120, block_size=8, max_model_len=128, host_memory_gb=0.01, max_running=24
    )
    loop = EngineCore(config)
    alive: set[str] = set()
    ended, warm_mb = 0, 0.0
    for index in range(REQUESTS):
        loop.add(
            request(rng, f"r{index}"), [rng.randrange(1, 4)] * 16 + rng.choices(range(1, VOCAB), k=rng.randint(1, 60))
        )
        alive.add(f"r{index}")
        while len(alive) > 40:
            if rng.random() < 0.1:
                loop.abort(rng.choice(sorted(alive)))
            for output in loop.step():
                if getattr(output, "usage", None) is not None:
                    alive.remove(output.request_id)
                    ended += 1
        if index == WARM:
            warm_mb = rss_mb()
    while loop.has_work:
        ended += sum(getattr(output, "usage", None) is not None for output in loop.step())
    assert ended == REQUESTS
    stats = loop.stats()
    assert (stats.free_blocks, stats.running, stats.waiting, stats.failed) == (stats.num_blocks, 0, 0, 0)
    assert stats.preemptions > 100
    loop.pool.check([], [])
    assert rss_mb() - warm_mb < MOST_MB


def request(rng: random.Random, name: str) -> GenRequest:
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 1, 3]), ignore_eos=True
    )
    return GenRequest(request_id=name, prompt=[], sampling=sampling, priority=rng.randrange(3))


def rss_mb() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 1e6
