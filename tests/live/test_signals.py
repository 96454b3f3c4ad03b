"""Nodes and engines report, on the session's cluster: a fake engine whose KV cache fills, a fake GPU exporter."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cluster_fixture import replica_pids, settled_replica_pids

import raytide as rt
from raytide.autoscaler.explain import lines
from raytide.autoscaler.providers.local.meter import set_use
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.core.objects.node import FRESH_S, NodeState

pytestmark = pytest.mark.cluster

GROWING = {"kind": "fake", "tokens_per_s": 50.0, "kv_tokens": 300, "max_model_len": 100_000}


@pytest.fixture
def endpoint(tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]) -> Iterator[rt.EndpointHandle]:
    """Each replica takes a GPU node of its own; by requests alone one would do for hundreds."""
    replicas = Replicas(min=1, max=2, target_ongoing=1000, downscale_delay_s=1.0)
    (tmp_path / "config.json").write_text("{}")
    spec = ServeSpec(name="fills", model=str(tmp_path), replicas=replicas, resources={"GPU": 8}, engine=GROWING)
    handle = tide.serve(spec)
    yield handle.wait(replicas=1, timeout_s=360.0)
    handle.delete()
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED, within_s=60.0)


def test_full_caches_buy_a_node_and_neither_a_silent_replica_nor_a_busy_or_silent_node_goes(
    live: LocalCluster, tide: rt.Client, endpoint: rt.EndpointHandle, eventually: Callable[..., None]
) -> None:
    def nodes() -> set[str]:
        return {n.id for n in tide.status().nodes if n.type == "gpu8" and n.state is NodeState.READY}

    def explained(*words: str) -> bool:
        return any(all(word in line for word in words) for line in lines(tide.client.plans(limit=200)))

    def target() -> int:
        return endpoint.refresh().status.endpoint.target_replicas

    def is_heard() -> bool:
        load = json.loads((live.run_dir / "live.json").read_text())["loads"].get("fills")
        if load is None:
            return False
        fresh = [replica for replica in load["replicas"] if replica["at_s"] > load["at_s"] - FRESH_S]
        return len(fresh) == load["ready"] == 2

    eventually(lambda: len(nodes()) == 1)  # those of earlier tests have left
    (first,), (early,) = nodes(), settled_replica_pids(live, 1, eventually)
    with ExitStack() as two_requests:
        for _ in range(2):
            two_requests.enter_context(forever(endpoint))
        eventually(lambda: target() == 2)
        eventually(lambda: explained("scale", "fills to 2 replicas", "KV caches are full"))
        assert endpoint.refresh().status.ongoing <= 2
        eventually(lambda: endpoint.refresh().status.ready_replicas == 2)
        eventually(lambda: len(nodes() - {first}) == 1 and len(set(replica_pids(live)) - {early}) == 1)
        (second,), (late,) = nodes() - {first}, set(replica_pids(live)) - {early}
        eventually(lambda: explained("launch", second, "endpoint fills lacks 1 x"))
        eventually(is_heard)
        with stopped(late):
            eventually(lambda: not is_heard())
            two_requests.close()
            eventually(lambda: explained("wait", "fills", "1 of its 2 replicas did not report"))
            assert target() == 2
        for node in (first, second):
            set_use(live.run_dir, node, gpu=0.97)
    eventually(lambda: target() == 1)
    eventually(lambda: any(explained("wait", node, "its GPU is in use") for node in (first, second)))
    (held,) = (node for node in (first, second) if explained("wait", node, "its GPU is in use"))
    set_use(live.run_dir, held, gpu=None)
    eventually(lambda: explained("wait", held, "its GPU use was last measured at"))
    assert nodes() == {first, second}
    for node in (first, second):
        set_use(live.run_dir, node, gpu=0.0)  # they may go now


def forever(endpoint: rt.EndpointHandle) -> Any:
    """One answer that goes on until it is closed."""
    stream = endpoint.openai(max_retries=0, timeout=180.0).completions.create(
        model="fills", prompt="x", max_tokens=50_000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    return stream


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
