"""The demo's specs, sized for two cores and three minutes."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.node import MARKET_LABEL, CapacityType
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import OptimSpec, TrainSpec

SYSTEM_LINK = "sitecustomize.py"
"""A file of the standard library that Debian and Ubuntu link into `/etc`, which no dataset may read."""
ON_DEMAND = {MARKET_LABEL: str(CapacityType.ON_DEMAND)}
SPOT = {MARKET_LABEL: str(CapacityType.SPOT)}
GANG = 2
MODEL = "tide-tiny"
PROMPT = "def main("
STREAMS = 32
LOAD: Mapping[str, Any] = {
    "concurrency": STREAMS,
    "requests": STREAMS,
    "warmup": 0,
    "prompt_tokens": (4, 16),
    "output_tokens": 192,
    "timeout_s": 120.0,
    "body": {"temperature": 0.8},
}
"""The options of `EndpointHandle.bench` for one wave of load: concurrent streams that start together."""


def data(out: Path) -> DataSpec:
    """Returns the spec of the demo's dataset. Its text is Python's standard library, which every machine with Python
    has.
    """
    return DataSpec(
        name="stdlib",
        inputs=(sysconfig.get_path("stdlib"),),
        include=(".py",),
        exclude=(*("site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"), SYSTEM_LINK),
        tokenizer=TokenizerSpec(train=TrainTokenizer(vocab_size=2048, sample_documents=300)),
        out=str(out / "dataset"),
        gang=GangSpec(shapes=(Shape(resources={"CPU": 2}, labels=ON_DEMAND),)),
    )


def train(out: Path) -> TrainSpec:
    return TrainSpec(
        name=MODEL,
        dataset=str(out / "dataset"),
        out=str(out / "run"),
        model=ModelSpec(dim=128, layers=4, heads=4, kv_heads=2, max_seq_len=1024),
        optim=OptimSpec(lr=6e-3, warmup_steps=5),
        steps=80,
        global_batch=16,
        micro_batch=8,
        seq_len=128,
        checkpoint_every=10,
        gang=GangSpec(shapes=(Shape(members=GANG, resources={"CPU": 1}, labels=SPOT),)),
    )


def serve(model: str) -> ServeSpec:
    return ServeSpec(
        name=MODEL,
        model=model,
        replicas=Replicas(min=1, max=3, target_ongoing=8, downscale_delay_s=4),
        resources={"CPU": 1},
        labels=ON_DEMAND,
    )
