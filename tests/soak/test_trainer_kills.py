"""Many kills of ranks and nodes in one run: it ends with the curve of one process, and with its samples.

SOAK_SEED sets the seed, which is printed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.actors.trainer.conftest import write_dataset
from tests.actors.trainer.gang_processes import Run, assert_undisturbed, lines, node_of
from tests.actors.trainer.kills import kill_at_random
from tests.cluster_fixture import kill_raylet
from tests.soak.work import SPOT, Corpus

import raytide as rt
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.train import ModelSpec, OptimSpec, TrainSpec

pytestmark = [pytest.mark.soak, pytest.mark.alone, pytest.mark.timeout(1200)]

SEED = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(10_000))
KILLS = 50


def test_fifty_random_kills_in_processes(tmp_path: Path, say: Callable[[str], None]) -> None:
    spec = TrainSpec(
        dataset=str(write_dataset(tmp_path / "tokens")),
        out=str(tmp_path / "run"),
        model=ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, max_seq_len=64),
        optim=OptimSpec(lr=1e-3, warmup_steps=20),
        steps=400,
        global_batch=6,
        micro_batch=2,
        seq_len=32,
        checkpoint_every=3,
        export=False,
        record_samples=True,
        collective_timeout_s=8.0,
    )
    say(f"\n{KILLS} kills, seed {SEED} (SOAK_SEED)")
    run = Run(spec, Shape(members=4, min_members=1, resources={"CPU": 1.0}))
    try:
        told = kill_at_random(run, kills=KILLS, chance=random.Random(SEED))
        result = run.result()
    finally:
        run.close()
    say(f"{result.restarts} restarts, {result.resizes} resizes, {result.steps_lost} steps lost; {'; '.join(told[-3:])}")
    assert result.steps == spec.steps
    assert_undisturbed(spec)


def test_five_random_kills_through_ray(
    stormy: LocalCluster, corpus: Corpus, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """Raylets are killed with their node, and ranks alone."""
    chance = random.Random(SEED)
    spec = TrainSpec(
        dataset=corpus.dataset,
        out=str(tmp_path / "run"),
        model=ModelSpec(dim=32, layers=2, heads=4, max_seq_len=64),
        optim=OptimSpec(lr=1e-3, warmup_steps=20),
        steps=300,
        global_batch=6,
        micro_batch=2,
        seq_len=64,
        checkpoint_every=5,
        export=False,
        record_samples=True,
        gang=GangSpec(shapes=(Shape(members=3, min_members=1, resources={"CPU": 1}, labels=SPOT),)),
    )
    say(f"\n5 kills through Ray, seed {SEED} (SOAK_SEED)")
    with rt.Client(ApiClient.from_run_dir(stormy.run_dir)) as tide:
        run = tide.train(spec)
        for kill in range(5):
            _until_step(run, spec, 40 * kill + chance.randint(5, 40))
            formed = [event for event in lines(spec, "events.jsonl") if event["event"] == "formed"][-1]
            rank = chance.randrange(formed["world"])
            if chance.random() < 0.6:
                kill_raylet(stormy, node_of(formed["hosts"][rank]))
            else:
                os.kill(formed["pids"][rank], signal.SIGKILL)
        run.wait(timeout_s=300.0)
        progress = run.refresh().progress
    say(f"{progress['restarts']} restarts, {progress['resizes']} resizes, {progress['steps_lost']} steps lost")
    assert progress["step"] == spec.steps
    assert_undisturbed(spec)


def _until_step(run: rt.Run, spec: TrainSpec, step: int) -> None:
    deadline = time.monotonic() + 180.0
    while not any(line["step"] >= step for line in lines(spec, "metrics.jsonl")):
        assert not run.refresh().view.job.is_final, f"it ended before step {step}"
        assert time.monotonic() < deadline, f"no step {step}: {lines(spec, 'events.jsonl')[-3:]}"
        time.sleep(0.2)
