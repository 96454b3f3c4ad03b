"""Users' jobs in a storm, so small that many of them come and go in a few minutes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec

SPOT = {"ray.io/market-type": "spot"}
ON_DEMAND = {"ray.io/market-type": "on-demand"}
PATIENCE = 50
"""Restarts of a driver: a storm kills more of them than any job would see."""


@dataclass(frozen=True, slots=True)
class Corpus:
    inputs: tuple[str, ...]
    dataset: str
    model: str
    out: Path


def train(corpus: Corpus, number: int, chance: random.Random) -> JobSpec:
    members = chance.choice((1, 2, 2))
    spec = TrainSpec(
        name=f"train-{number}",
        dataset=corpus.dataset,
        out=str(corpus.out / f"train-{number}"),
        model=ModelSpec(dim=32, layers=1, heads=2, max_seq_len=128),
        steps=chance.randrange(20, 120),
        global_batch=4,
        micro_batch=2,
        seq_len=64,
        checkpoint_every=10,
        gang=GangSpec(shapes=(Shape(members=members, resources={"CPU": 1}, labels=SPOT),)),
    )
    return _job(JobKind.TRAIN, spec)


def data(corpus: Corpus, number: int) -> JobSpec:
    spec = DataSpec(
        name=f"data-{number}",
        inputs=corpus.inputs,
        include=(".py",),
        tokenizer=TokenizerSpec(train=TrainTokenizer(vocab_size=400, sample_documents=10)),
        out=str(corpus.out / f"data-{number}"),
        workers=1,
    )
    return _job(JobKind.DATA, spec)


def gang(number: int, chance: random.Random) -> JobSpec:
    preferred = Shape(members=chance.choice((1, 2)), resources={"CPU": 1}, labels=SPOT)
    shapes = (preferred, Shape(members=1, resources={"CPU": 1})) if chance.random() < 0.5 else (preferred,)
    return JobSpec(kind=JobKind.GANG, name=f"gang-{number}", gang=GangSpec(shapes=shapes), heartbeat_timeout_s=20)


def endpoint(corpus: Corpus) -> ServeSpec:
    return ServeSpec(
        name="soaked",
        model=corpus.model,
        replicas=Replicas(min=1, max=2, target_ongoing=2, downscale_delay_s=5),
        labels=ON_DEMAND,
    )


def _job(kind: JobKind, spec: TrainSpec | DataSpec) -> JobSpec:
    config = spec.model_dump(mode="json")
    return JobSpec(kind=kind, name=spec.name, gang=spec.gang, config=config, max_restarts=PATIENCE)
