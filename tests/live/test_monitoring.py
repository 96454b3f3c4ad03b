"""Alerts on a real cluster: a GPU with rising ECC errors is drained, its gang goes on elsewhere, and a mail arrives."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml
from tests.cluster_fixture import settled_replica_pids
from tests.dashboards.alerts.test_notify import smtp

import raytide as rt
from raytide.actors.trainer.runners.local import train_local
from raytide.autoscaler.nodes.orders import DRAIN_S
from raytide.autoscaler.providers.local.meter import GpuSettings, set_gpu
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.core.objects.gang import GangSpec, LeaseState, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.objects.node import NodeState
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec

pytestmark = pytest.mark.cluster

ECC = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"


@contextmanager
def monitoring(live: LocalCluster, eventually: Callable[..., None], **section: Any) -> Iterator[None]:
    """Restarts the monitor with this section of cluster.yaml, and afterwards with the old one."""
    path = Path(live.config_path)
    before = path.read_text()
    file = yaml.safe_load(before)
    file["metadata"]["raytide"]["monitoring"] = section
    path.write_text(yaml.safe_dump(file))
    restart_monitor(live, eventually)
    try:
        yield
    finally:
        path.write_text(before)
        restart_monitor(live, eventually)


def restart_monitor(live: LocalCluster, eventually: Callable[..., None]) -> None:
    old = live.process("monitor")
    assert old is not None
    old.send(9)

    def is_new() -> bool:
        new = live.process("monitor")
        return new is not None and new.alive and new.pid != old.pid

    eventually(is_new, within_s=60)


@pytest.mark.soak
def test_a_gpu_with_rising_ecc_errors_is_drained_and_its_gang_goes_on_elsewhere(
    live: LocalCluster,
    tide: rt.Client,
    eventually: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = JobSpec(kind=JobKind.GANG, name="sick", gang=GangSpec(shapes=(Shape(resources={"GPU": 8}),)))
    job = tide.client.submit(spec).job.id
    eventually(lambda: tide.client.lease(job).state is LeaseState.ACTIVE)
    (member,) = tide.client.lease(job).members
    with smtp() as (box, port):
        email = {"host": "127.0.0.1", "port": port, "tls": "off", "sender": "raytide@here.org", "to": ["ops@here.org"]}
        with monitoring(
            live,
            eventually,
            scrape_s=1,
            actions=[{"alert": "GpuEccUncorrectable", "do": "quarantine_node"}],
            notify={"email": email, "group_wait_s": 0},
        ):
            query = {"metric": ECC, "since_s": 60, "step_s": 1, "node": member.node_id}
            eventually(lambda: has_points(tide.client.call("GET", "/v1/history", query=query), 3))
            set_gpu(live.run_dir, member.node_id, GpuSettings(ecc_errors=4))
            broke_s = time.time()
            eventually(lambda: firing(tide, "GpuEccUncorrectable"))
            fired_s = time.time()
            eventually(lambda: moved(tide, job, member.node_id), within_s=DRAIN_S + 60)
            moved_s = time.time()
            eventually(lambda: any("GpuEccUncorrectable" in mail["Subject"] for mail in box.mails))
    about = [each for each in tide.client.call("GET", "/v1/alerts/actions") if each["object"] == member.node_id]
    assert [(each["kind"], each["state"]) for each in about if each["state"] != "held"] == [("quarantine_node", "done")]
    (entry,) = tide.client.audit(action="order.", object=member.node_id)
    assert (entry.actor, entry.action) == ("admin", "order.quarantine_node")
    left = next((node for node in tide.client.status().nodes if node.id == member.node_id), None)
    assert left is None or (left.state is not NodeState.READY and left.quarantined)
    tide.client.stop(job)
    with capsys.disabled():
        sys.stdout.write(f"\nalert after {fired_s - broke_s:.1f} s, gang elsewhere after {moved_s - broke_s:.1f} s\n")


@pytest.fixture(scope="module")
def model(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served")
    shape = ModelSpec(dim=64, layers=2, heads=4, max_seq_len=512)
    result = train_local(
        TrainSpec(dataset=str(dataset), out=str(out), model=shape, steps=2, global_batch=2, micro_batch=2, seq_len=64)
    )
    assert result.model_dir is not None
    return Path(result.model_dir)


@pytest.fixture
def hangs(tide: rt.Client, model: Path, eventually: Callable[..., None]) -> Iterator[rt.EndpointHandle]:
    spec = ServeSpec(name="hangs", model=str(model), replicas=Replicas(min=1, max=1), resources={"CPU": 1})
    handle = tide.serve(spec)
    yield handle.wait(replicas=1, timeout_s=360.0)
    handle.delete()
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED, within_s=60.0)


def test_a_hung_replica_is_restarted(
    live: LocalCluster,
    tide: rt.Client,
    hangs: rt.EndpointHandle,
    eventually: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (replica,) = settled_replica_pids(live, 1, eventually)
    (engine,) = (p for p in psutil.Process(replica).children(recursive=True) if "engine_process" in str(p.cmdline()))
    with monitoring(
        live,
        eventually,
        scrape_s=1,
        alerts={"ReplicaUnreachable": {"for_s": 15}},  # or it might be restarted between two probes
        actions=[{"alert": "ReplicaUnreachable", "do": "restart_replica"}],
        probes=[{"endpoint": "hangs", "prompt": "a", "api": "completions", "every_s": 5, "timeout_s": 3}],
    ):
        eventually(lambda: probed(tide) is True)
        query = {"metric": "up", "job": "raytide-replica", "endpoint": "hangs", "since_s": 60, "step_s": 1}
        eventually(lambda: has_points(tide.client.call("GET", "/v1/history", query=query), 2))
        engine.suspend()
        hung_s = time.time()
        eventually(lambda: probed(tide) is False)
        eventually(lambda: firing(tide, "ReplicaUnreachable"))
        fired_s = time.time()
        eventually(lambda: not engine.is_running() and answers(hangs), within_s=120)
        healed_s = time.time()
        eventually(lambda: probed(tide) is True)
        eventually(lambda: not firing(tide, "ReplicaUnreachable"), within_s=400)
    done = [each for each in tide.client.call("GET", "/v1/alerts/actions") if each["alert"] == "ReplicaUnreachable"]
    assert [(each["kind"], each["state"]) for each in done] == [("restart_replica", "done")]
    with capsys.disabled():
        sys.stdout.write(f"\nalert after {fired_s - hung_s:.1f} s, healed after {healed_s - hung_s:.1f} s\n")


def answers(handle: rt.EndpointHandle) -> bool:
    try:
        handle.openai(timeout=30.0, max_retries=0).completions.create(model="hangs", prompt="a", max_tokens=2)
    except openai.OpenAIError:
        return False
    return True


def probed(tide: rt.Client) -> bool | None:
    """Returns whether the last probe was answered; None before the first."""
    last = tide.client.call("GET", "/v1/probes")
    return last[0]["success"] if last else None


def has_points(found: dict[str, Any], count: int) -> bool:
    return any(len(curve["points"]) >= count for curve in found["series"])


def firing(tide: rt.Client, name: str) -> bool:
    return any(a["name"] == name and a["state"] == "firing" for a in tide.client.call("GET", "/v1/alerts"))


def moved(tide: rt.Client, job: str, node_id: str) -> bool:
    lease = tide.client.lease(job)
    return len(lease.usable) == 1 and all(member.node_id != node_id for member in lease.members)
