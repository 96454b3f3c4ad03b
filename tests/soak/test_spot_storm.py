"""A spot market that takes four of six nodes at once, on real raylets: the gang goes on with two until it is whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import raytide as rt
from raytide.autoscaler.providers.local.spot import reclaim
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec, JobState

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(0)]


def test_a_storm_that_takes_four_of_six_spot_nodes_leaves_the_others_at_work_until_all_are_back(
    live: LocalCluster, tide: rt.Client, eventually: Callable[..., None]
) -> None:
    shape = Shape(members=6, min_members=2, resources={"CPU": 1}, labels={"ray.io/market-type": "spot"})
    spec = JobSpec(kind=JobKind.GANG, name="storm", gang=GangSpec(shapes=(shape,)), heartbeat_timeout_s=60)
    job = tide.client.submit(spec).job.id
    eventually(lambda: tide.job(job).state is not JobState.QUEUED)
    eventually(lambda: len(tide.client.lease(job).usable) == 6, within_s=150.0)
    before = {member.node_id: member for member in tide.client.lease(job).members}
    kept = sorted(before)[:2]
    for node_id in before.keys() - set(kept):
        reclaim(live.run_dir, node_id)
    eventually(lambda: len(tide.client.lease(job).usable) < 6)
    eventually(lambda: len(tide.client.lease(job).usable) == 6, within_s=150.0)
    after = {member.node_id: member for member in tide.client.lease(job).members}
    assert [after[node_id].incarnation for node_id in kept] == [before[node_id].incarnation for node_id in kept]
    tide.client.release(job)
