"""A gang of a higher class takes members of an elastic trainer, which shrinks in place and grows back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.actors.trainer.conftest import write_dataset
from tests.actors.trainer.gang_processes import lines

import raytide as rt
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import OptimSpec, TrainSpec

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(900)]

SPOT = {"ray.io/market-type": "spot"}
"""The fleet has six nodes of it."""
STEPS = 3000


def test_a_higher_class_shrinks_a_trainer_in_place_and_it_grows_back(
    tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    spec = TrainSpec(
        dataset=str(write_dataset(tmp_path / "tokens")),
        out=str(tmp_path / "run"),
        model=ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, max_seq_len=64),
        optim=OptimSpec(lr=1e-3, warmup_steps=20),
        steps=STEPS,
        global_batch=8,
        micro_batch=1,
        seq_len=32,
        checkpoint_every=500,
        export=False,
        gang=GangSpec(shapes=(Shape(members=4, min_members=2, resources={"CPU": 1}, labels=SPOT),)),
    )
    run = tide.train(spec, priority="low")

    def formed() -> list[dict[str, object]]:
        return [event for event in lines(spec, "events.jsonl") if event["event"] == "formed"]

    def world() -> object:
        return formed()[-1]["world"] if formed() else 0

    eventually(lambda: world() == 4 and len(lines(spec, "metrics.jsonl")) > 2, within_s=180.0)
    before = formed()[-1]["pids"]
    with tide.gang(nodes=4, cpus=1, labels=SPOT, priority="high", name="urgent") as gang:
        assert len(gang.members) == 4
        assert world() == 2
        assert set(formed()[-1]["pids"]) < set(before), "those that stay are the same processes"  # type: ignore[call-overload]
        assert run.refresh().view.job.preemptions == 0
    eventually(lambda: world() == 4, within_s=240.0)
    run.stop()
    steps = [line["step"] for line in lines(spec, "metrics.jsonl")]
    assert steps == list(range(steps[0], steps[0] + len(steps))), "no step is lost, none is done twice"
