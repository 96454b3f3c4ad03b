"""Registered datasets in the store: which jobs read a version."""

from __future__ import annotations

from typing import Any

import pytest

from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.specs.data import DatasetVersionSpec
from raytide.core.specs.mixture import MOST_SOURCES
from raytide.core.state import Store

OURS, OTHER = {"dataset": "/data/ours"}, {"dataset": "/data/other"}


@pytest.mark.parametrize(
    "config",
    [
        OURS,
        {"dataset": {"sources": [OTHER, OURS]}},
        {"dataset": {"sources": [OTHER] * (MOST_SOURCES - 1) + [OURS]}},
        {**OTHER, "eval": OURS},
    ],
)
def test_a_job_uses_each_dataset_that_it_reads(store: Store, config: dict[str, Any]) -> None:
    def submit(config: dict[str, Any]) -> str:
        gang = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
        spec = JobSpec(kind=JobKind.TRAIN, name="t", team="blue", gang=gang, config={"out": "/runs/t", **config})
        return store.submit_job(spec, "ana", 1.0).id

    reader = submit(config)
    submit({"dataset": {"sources": [OTHER]}, "eval": OTHER})
    submit(OTHER)
    version = DatasetVersionSpec(
        name="ours", team="blue", location="/data/ours", sha256="a" * 64, documents=1, tokens=1, vocab_size=300
    )
    assert store.datasets.uses(version).jobs == (reader,)
