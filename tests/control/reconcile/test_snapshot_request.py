"""The controller's Snapshot, asked for from outside: whole, and without what is nobody's business."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.simulate.test_live import cluster, job, ready, running

from raytide.control.reconcile import snapshot_request
from raytide.control.reconcile.snapshot_request import answer_request, request_snapshot
from raytide.control.views import from_json, to_json
from raytide.core.errors import ClusterError
from raytide.core.io.atomic_file import read_json
from raytide.core.objects.snapshot import Demand, Pool, Snapshot

NODE = ready(1, taken={"GPU": 1})
HOLDER, LEASE = running(1, NODE)
SEEN = cluster(
    nodes=(NODE,),
    jobs=(HOLDER, job(2)),
    leases=(LEASE,),
    demand=(Demand({"CPU": 1.0}, {"zone": "in(a,b)"}, count=3),),
    pools=(Pool("gpu1", "local", 2, 60_000.0, "none left"),),
)


def test_a_snapshot_goes_over_the_wire_and_comes_back_whole() -> None:
    assert from_json(Snapshot, to_json(SEEN)) == SEEN


def test_nothing_is_written_unless_somebody_asked(tmp_path: Path) -> None:
    answer_request(tmp_path, SEEN)
    assert not any(tmp_path.iterdir())


def test_who_asks_gets_the_next_tick_s_snapshot_without_the_jobs_own_configuration(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        for number in (1, 2):  # the second time an old answer lies there
            asked = pool.submit(request_snapshot, tmp_path)
            while not asked.done():
                answer_request(tmp_path, replace(cluster(jobs=(job(1),)), next_lease=number))
            assert f'"next_lease": {number}' in asked.result()
    told = from_json(Snapshot, read_json(tmp_path / "snapshot.json"))
    assert told.jobs[0].spec.config == {} and told.jobs[0].spec.gang == job(1).spec.gang
    assert not (tmp_path / "snapshot.asked").exists()


def test_an_answer_of_the_same_clock_tick_as_the_last_one_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = snapshot_request.write_json

    def write_at_once(path: Path, data: Mapping[str, object], **options: bool) -> None:
        write(path.with_suffix(".part"), data, **options)
        os.utime(path.with_suffix(".part"), (1.0, 1.0))
        path.with_suffix(".part").replace(path)

    monkeypatch.setattr(snapshot_request, "write_json", write_at_once)
    with ThreadPoolExecutor(1) as pool:
        for number in (1, 2):
            asked = pool.submit(request_snapshot, tmp_path)
            while not asked.done():
                answer_request(tmp_path, replace(cluster(jobs=(job(1),)), next_lease=number))
            assert f'"next_lease": {number}' in asked.result()


def test_a_controller_that_does_not_tick_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="the controller made no tick"):
        request_snapshot(tmp_path, patience_s=0.0)
