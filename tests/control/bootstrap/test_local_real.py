"""One real Ray cluster: nodes that start together, die, are reclaimed and end, and a `down` that leaves nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster_fixture import ray_nodes

from raytide.autoscaler.providers.local.files import MARK as NODE_MARK
from raytide.autoscaler.providers.local.provider import NODE_ID_LABEL, LocalProvider
from raytide.autoscaler.providers.local.spot import reclaim
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster
from raytide.control.bootstrap.loopback import is_listening
from raytide.control.bootstrap.wiring import local_provider
from raytide.core.io.process import marked
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType

pytestmark = pytest.mark.cluster

TYPE = NodeType(
    name="g1.spot", resources={"CPU": 1, "GPU": 1, "slots": 2}, market=CapacityType.SPOT, price_micro_usd_h=900_000
)


@pytest.fixture(scope="module")
def other_user() -> Iterator[bool]:
    """Holds the port of a Ray of another user of this machine; False if somebody else holds it."""
    with socket.socket() as held:
        try:
            held.bind(("127.0.0.1", 10001))
            held.listen()
        except OSError:
            yield False
        else:
            yield True


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory, other_user: bool) -> Iterator[LocalCluster]:
    """Real Ray, stand-in controller and API: nobody but the test launches and ends nodes."""
    standins = str(Path(__file__).parents[1] / "standins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([standins, str(Path(__file__).parents[3] / "platform")]))
        children = {"controller": "standin_child", "api": "standin_api"}
        with local.temporary(tmp_path_factory.mktemp("home"), children=children) as started:
            yield started
    assert marked(MARK, started.cluster_id) == []
    assert not is_listening(started.gcs_address)
    assert not started.temp_dir.exists()
    assert list((started.logs_dir / "ray").glob("gcs_server*"))


@pytest.fixture
def provider(ray_cluster: LocalCluster) -> Iterator[LocalProvider]:
    provider = local_provider(ray_cluster)
    yield provider
    for machine in provider.machines():
        provider.terminate(machine.node_id)
    provider.close()


def launch(provider: LocalProvider, *node_ids: str) -> None:
    for node_id in node_ids:
        provider.launch(Node(node_id, TYPE.name, "local", TYPE.market, 900_000, NodeState.REQUESTED, 0.0), TYPE)


def nodes_in_ray(of: LocalCluster) -> dict[str, dict[str, Any]]:
    """The living nodes, by raytide's node id."""
    ours = [node for node in ray_nodes(of) if node["state"] == "ALIVE" and NODE_ID_LABEL in node["labels"]]
    return {node["labels"][NODE_ID_LABEL]: node for node in ours}


def test_a_cluster_comes_up_beside_the_ray_of_another_user(ray_cluster: LocalCluster, other_user: bool) -> None:
    if not other_user:
        pytest.skip("127.0.0.1:10001 is taken")
    assert ray_cluster.is_alive("head")


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.05)


def test_nodes_launched_in_the_same_second_join_with_their_labels_and_end(
    ray_cluster: LocalCluster, provider: LocalProvider
) -> None:
    launch(provider, "n1", "n2")
    until(lambda: set(nodes_in_ray(ray_cluster)) == {"n1", "n2"})
    joined = nodes_in_ray(ray_cluster)["n1"]
    assert {name: joined["resources_total"][name] for name in TYPE.resources} == TYPE.resources
    expected = {**TYPE.all_labels("local"), NODE_ID_LABEL: "n1"}
    assert {name: joined["labels"][name] for name in expected} == expected

    reclaim(ray_cluster.run_dir, "n1")
    assert marked(NODE_MARK, str(ray_cluster.run_dir / "nodes" / "n1")) == []
    provider.terminate("n2")
    provider.close()
    assert marked(NODE_MARK, str(ray_cluster.run_dir / "nodes" / "n2")) == []
    assert {machine.node_id: machine.reason for machine in provider.machines()} == {
        "n1": "reclaimed",
        "n2": "terminated",
    }
    until(lambda: nodes_in_ray(ray_cluster) == {})


def test_a_node_whose_raylet_dies_ends_with_its_agents_and_workers(
    ray_cluster: LocalCluster, provider: LocalProvider
) -> None:
    launch(provider, "n3")
    until(lambda: "n3" in nodes_in_ray(ray_cluster))
    mark = str(ray_cluster.run_dir / "nodes" / "n3")
    # the node's process, the raylet and its two agents: titles that Ray gives them do not hide the mark
    until(lambda: len(marked(NODE_MARK, mark)) >= 4)
    ended = threading.Event()
    provider.watch(ended.set)
    (raylet,) = [process for process in marked(NODE_MARK, mark) if command(process.pid).endswith("/raylet")]
    os.kill(raylet.pid, 9)
    assert ended.wait(120.0)
    until(lambda: marked(NODE_MARK, mark) == [])
    machine = next(machine for machine in provider.machines() if machine.node_id == "n3")
    assert machine.ended_at_s is not None
    assert machine.reason in ("its raylet ended", "its raylet did not start")  # it joins a moment before it is started


def test_tasks_on_a_node_run_without_niceness(ray_cluster: LocalCluster, provider: LocalProvider) -> None:
    """Ray's default of 15 would put replicas and trainers behind everything else on their machines."""
    launch(provider, "n4")
    code = "import os, ray; ray.init(); print('niceness', ray.get(ray.remote(lambda: os.nice(0)).remote()))"
    environment = {**ray_cluster.environment(), **ray_cluster.ray_access}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert "niceness 0" in done.stdout, done.stderr[-2000:]


def test_a_submitted_job_finds_its_python_its_cluster_and_raytide(ray_cluster: LocalCluster) -> None:
    from ray.job_submission import JobSubmissionClient

    code = (
        "import os, ray, raytide.core.money;"
        " from raytide.control.bootstrap import local;"
        " print('cluster', local.find().cluster_id == os.environ['RAYTIDE_CLUSTER'])"
    )
    client = JobSubmissionClient(ray_cluster.dashboard_url, headers=ray_cluster.ray_headers)
    job = client.submit_job(entrypoint=f'python -c "{code}"')
    until(lambda: client.get_job_status(job).is_terminal())
    assert "cluster True" in client.get_job_logs(job)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_nobody_enters_ray_over_http_without_the_token(ray_cluster: LocalCluster, headers: dict[str, str]) -> None:
    body = {"entrypoint": "true"}
    for base in (ray_cluster.dashboard_url, f"http://{ray_cluster.agent_address}"):
        jobs = "/api/jobs/" if base == ray_cluster.dashboard_url else "/api/job_agent/jobs/"
        assert httpx.post(base + jobs, json=body, headers=headers, timeout=60.0).status_code in (401, 403), base
    nodes = f"{ray_cluster.dashboard_url}/api/v0/nodes"
    assert httpx.get(nodes, headers=headers, timeout=60.0).status_code in (401, 403)


def test_no_driver_and_no_reader_enters_rays_gcs_without_the_token(ray_cluster: LocalCluster) -> None:
    read = f"from raytide.autoscaler.ray_gcs import GcsReader; GcsReader('{ray_cluster.gcs_address}').nodes()"
    drive = f"import ray; ray.init('{ray_cluster.gcs_address}')"
    strangers = []  # side by side: each knocks for some ten seconds
    for mode in ("disabled", "token"):
        token = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": "x"}
        environment = {**ray_cluster.environment(), **token}
        for code in (read, drive):
            run = [sys.executable, "-c", code]
            strangers.append(subprocess.Popen(run, stderr=subprocess.PIPE, text=True, env=environment))
    try:
        for stranger in strangers:
            _, said = stranger.communicate(timeout=240)
            assert stranger.returncode != 0
            assert "oken" in said, said[-2000:]
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_rays_own_command_enters_with_what_status_prints(ray_cluster: LocalCluster) -> None:
    ray = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    environment = {**os.environ, **ray_cluster.ray_access}
    done = subprocess.run(ray, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Autoscaler status" in done.stdout


def command(pid: int) -> str:
    """Returns the program of a process; nothing if it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""
