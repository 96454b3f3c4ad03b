"""Two heads of one cluster for real, with PostgreSQL, Redis, Ray and a machine reached over ssh: one is cut off and
paused, the other takes over, and what wakes up later does nothing. The soak test_standby_heads.py kills ten."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.heads_fixture import Heads, heads, wait_until
from tests.server_fixtures import postgres_server, redis_port

from raytide.autoscaler.providers.local.files import MARK, NodeFolder
from raytide.core.io.process import marked

__all__ = ["postgres_server", "redis_port"]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
LONG_S = 240.0


def nodes(of: Heads) -> dict[str, tuple[str, int]]:
    """State and process of the raylet's keeper of each node that the records have."""
    found = {}
    for file in (of.hosts.home(1) / "raytide" / "hosts").glob("*/*/*/machine.json"):
        process = NodeFolder(file.parent).process()
        if process is not None and process.alive:
            found[file.parent.name] = (str(process.pid), len(marked(MARK, str(file.parent))))
    return found


@pytest.mark.soak
def test_a_paused_head_that_wakes_up_writes_nothing_and_ends_no_node(
    tmp_path: Path, postgres_server: str, redis_port: int, eventually: Callable[..., None]
) -> None:
    with heads(tmp_path, postgres_server, redis_port, 1, min_workers=1) as cluster:
        cluster.start("a")
        wait_until(lambda: cluster.leader() == "a", LONG_S, cluster.logs)
        cluster.start("b")
        eventually(lambda: cluster.standbys() == ("b",), within_s=LONG_S)

        def ready() -> list[str]:
            return [node.id for node in cluster.client().status().nodes if node.state == "ready"]

        eventually(lambda: len(ready()) == 1, within_s=LONG_S)
        before, raylets = ready(), nodes(cluster)
        assert len(raylets) == 1

        paused = cluster.pause("a")
        assert len(paused) == 3
        wait_until(lambda: cluster.leader() == "b", LONG_S, cluster.logs)
        eventually(lambda: ready() == before, within_s=LONG_S)
        assert nodes(cluster).keys() == raylets.keys(), "the node lived on without a head"

        cluster.watch_writes()
        for process in paused:
            process.send(signal.SIGCONT)
        eventually(lambda: cluster.standbys() == ("a",), within_s=LONG_S)
        assert set(cluster.written_by("a")) == {("leaders", "standby:" + cluster.record("a").holder)}
        assert ("leaders", "controller") in cluster.written_by("b"), "the writes are noted"
        assert ready() == before and nodes(cluster).keys() == raylets.keys()
        assert cluster.leader() == "b"
