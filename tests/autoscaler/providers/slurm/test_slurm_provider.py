"""Slurm's jobs as nodes: one job for each node, billed while it runs, and every way in which Slurm takes it back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.autoscaler.providers.slurm.fake_slurm import FakeSlurm

from raytide.autoscaler.nodes.lifecycle import overdue
from raytide.autoscaler.providers.base import Machine, Notice
from raytide.autoscaler.providers.hosts.provider import HostCluster
from raytide.autoscaler.providers.slurm.provider import SlurmProvider
from raytide.autoscaler.providers.slurm.queue import SlurmJob, parse_jobs
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError, ConfigError, ProviderError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.hardware.slurm import SlurmSection, check_slurm
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType

GPU = NodeType(name="gpu", resources={"CPU": 16, "GPU": 2}, price_micro_usd_h=3_600_000)
POLL_S = 1.0
Make = Callable[..., SlurmProvider]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def slurm(clock: VirtualClock) -> FakeSlurm:
    return FakeSlurm(clock)


@pytest.fixture
def make(tmp_path: Path, clock: VirtualClock, slurm: FakeSlurm) -> Make:
    """Providers over one run folder, as successive controllers would have."""
    (tmp_path / "token").write_text("secret\n")
    section = SlurmSection.model_validate({"node_types": {"gpu": {"partition": "a100"}}, "poll_s": POLL_S})

    def one(cluster_id: str = "tide-1", **options: bool) -> SlurmProvider:
        cluster = HostCluster(cluster_id, "10.0.0.100:6379", {"OURS": "1"}, tmp_path / "token")
        return SlurmProvider(section, [GPU], cluster, tmp_path, clock, slurm, **options)

    return one


def node(node_id: str = "n1") -> Node:
    return Node(node_id, "gpu", "local", CapacityType.ON_DEMAND, 3_600_000, NodeState.REQUESTED, 0.0)


def listed(provider: SlurmProvider, clock: VirtualClock) -> dict[str, Machine]:
    """Returns the machines at the next look at Slurm's queue."""
    clock.advance(4 * POLL_S)
    return {machine.node_id: machine for machine in provider.machines()}


def started(provider: SlurmProvider, slurm: FakeSlurm, clock: VirtualClock, *, limit_s: float | None = None) -> Machine:
    provider.launch(node(), GPU)
    slurm.start("1", limit_s=limit_s)
    return listed(provider, clock)["n1"]


def test_a_node_is_one_job_however_often_it_is_launched_and_by_whichever_controller(
    make: Make, slurm: FakeSlurm, clock: VirtualClock
) -> None:
    provider = make()
    for _ in range(3):
        provider.launch(node(), GPU)
    make().launch(node(), GPU)
    assert list(slurm.listed) == ["1"]
    assert listed(provider, clock) == {}  # it waits, which costs nothing
    assert provider.problems() == ("1 node in Slurm's queue: Resources (1).",)
    slurm.start("1")
    clock.advance(60)
    machine = listed(make(), clock)["n1"]
    assert (machine.address, machine.price_micro_usd_h, machine.started_at_s) == ("n1", 3_600_000, 1004.0)
    make().launch(node(), GPU)
    assert list(slurm.listed) == ["1"]


def test_a_submission_whose_answer_was_lost_is_not_repeated(make: Make, slurm: FakeSlurm) -> None:
    provider = make()
    slurm.loses_answers = True
    with pytest.raises(ClusterError):
        provider.launch(node(), GPU)
    slurm.loses_answers = False
    provider.launch(node(), GPU)
    assert list(slurm.listed) == ["1"]


def test_a_job_carries_what_its_node_type_asks_for_and_no_secret(make: Make, slurm: FakeSlurm, tmp_path: Path) -> None:
    make().launch(node(), GPU)
    arguments = slurm.arguments["1"]
    assert {"--partition=a100", "--gres=gpu:2", "--cpus-per-task=16", "--nodes=1"} <= set(arguments)
    file = Path(slurm.scripts["1"].split()[-1])
    request = json.loads(file.read_text())
    assert (request["node_id"], request["ray_token"], request["environment"]) == ("n1", "secret", {"OURS": "1"})
    assert "secret" not in slurm.scripts["1"] + " ".join(arguments)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_jobs_of_other_clusters_and_of_the_user_are_left_alone(
    make: Make, slurm: FakeSlurm, clock: VirtualClock
) -> None:
    make("tide-2").launch(node(), GPU)
    slurm.submit(["--comment=mine"], "")
    for job_id in ("1", "2"):
        slurm.start(job_id)
    provider = make()
    assert listed(provider, clock) == {}
    provider.terminate("n1")
    assert (slurm.cancelled, slurm.interrupted) == ([], [])


@pytest.mark.parametrize("job_id", ["12+0", "12_3", "12_[4-9]"])
def test_a_part_of_a_job_of_the_user_hides_no_node(
    make: Make, slurm: FakeSlurm, clock: VirtualClock, job_id: str
) -> None:
    slurm.listed[job_id] = SlurmJob(job_id, "RUNNING", 1000.0, None, "n9", "None", "mine")
    provider = make()
    provider.launch(node(), GPU)
    slurm.start("2")
    assert set(listed(provider, clock)) == {"n1"}
    assert slurm.cancelled == []


def test_a_job_that_is_refused_or_fails_at_once_leaves_no_node(
    make: Make, slurm: FakeSlurm, clock: VirtualClock
) -> None:
    provider = make()
    slurm.refusal = "Requested node configuration is not available"
    with pytest.raises(ProviderError, match="not available"):
        provider.launch(node(), GPU)
    slurm.refusal = ""
    provider.launch(node("n2"), GPU)
    slurm.move("1", "FAILED")
    assert listed(provider, clock) == {}
    with pytest.raises(ProviderError, match="Slurm's job 1 ended before it was a node: Slurm job 1: FAILED"):
        provider.launch(node("n2"), GPU)


def test_a_requeue_is_a_notice_and_then_the_end_of_the_node(make: Make, slurm: FakeSlurm, clock: VirtualClock) -> None:
    provider = make()
    started(provider, slurm, clock)
    assert provider.notices() == ()
    slurm.move("1", "COMPLETING")
    assert listed(provider, clock)["n1"].ended_at_s is None
    now_s = clock.now_s()
    assert provider.notices() == (Notice("n1", now_s + 30),)
    clock.advance(10)
    assert provider.notices() == (Notice("n1", now_s + 30),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "wall_ahead_s", lambda: 3600.0)
        assert provider.notices() == (Notice("n1", now_s + 30 + 3600.0),)
    slurm.move("1", "PENDING")
    ended = listed(provider, clock)["n1"]
    assert (ended.ended_at_s, ended.reason) == (clock.now_s(), "Slurm job 1: requeued")
    assert slurm.cancelled == ["1"]  # the planner decides what is bought next
    assert provider.notices() == ()


def test_the_end_of_a_time_limit_is_a_notice_in_time(make: Make, slurm: FakeSlurm, clock: VirtualClock) -> None:
    provider = make()
    started(provider, slurm, clock, limit_s=600)
    end_s = slurm.listed["1"].end_s
    assert end_s is not None and provider.notices() == ()
    clock.advance(end_s - 119 - clock.now_s())
    provider.machines()
    assert provider.notices() == (Notice("n1", end_s),)
    with pytest.MonkeyPatch.context() as patch:  # Slurm's times are those of the wall clock
        patch.setattr(clock, "wall_ahead_s", lambda: -3600.0)
        assert provider.notices() == ()


@pytest.mark.parametrize("state", ["CANCELLED", "NODE_FAIL", "TIMEOUT", "PREEMPTED"])
def test_a_job_that_ended_is_a_node_that_ended_with_its_last_words(
    make: Make, slurm: FakeSlurm, clock: VirtualClock, tmp_path: Path, state: str
) -> None:
    provider = make()
    started(provider, slurm, clock)
    (log,) = (each.partition("=")[2] for each in slurm.arguments["1"] if each.startswith("--output="))
    Path(log).write_text("first\nslurmstepd: it was killed\n\n")
    slurm.move("1", state)
    ended = listed(provider, clock)["n1"]
    assert (ended.ended_at_s, ended.reason) == (clock.now_s(), f"Slurm job 1: {state}: slurmstepd: it was killed")
    slurm.listed.clear()
    assert listed(provider, clock)["n1"] == ended


def test_an_end_asks_the_job_to_leave_and_cancels_it_if_it_does_not(
    make: Make, slurm: FakeSlurm, clock: VirtualClock
) -> None:
    provider = make()
    started(provider, slurm, clock)
    provider.terminate("n1")
    provider.terminate("n1")
    assert (slurm.interrupted, slurm.cancelled) == (["1"], [])
    assert listed(provider, clock)["n1"].ended_at_s is None, "it is billed until its job has ended"
    assert provider.notices() == ()
    clock.advance(15)
    listed(provider, clock)
    assert slurm.cancelled == ["1"]
    ended = listed(provider, clock)["n1"]
    assert (ended.ended_at_s, ended.reason) == (clock.now_s(), "terminated")


def test_the_end_of_a_node_that_waits_takes_it_out_of_the_queue(
    make: Make, slurm: FakeSlurm, clock: VirtualClock
) -> None:
    provider = make()
    provider.launch(node(), GPU)
    provider.terminate("n1")
    assert (slurm.cancelled, listed(provider, clock)) == (["1"], {})


def test_a_job_that_starts_after_its_node_was_given_up_is_cancelled(
    make: Make, slurm: FakeSlurm, clock: VirtualClock
) -> None:
    provider = make()
    provider.launch(node(), GPU)
    provider._request_file("n1").unlink()  # and a crash before the cancellation
    slurm.start("1")
    for provider in (make(), make()):
        listed(provider, clock)
    assert slurm.cancelled == ["1"]


def test_the_end_of_the_cluster_takes_waiting_jobs_out_of_the_queue(
    make: Make, slurm: FakeSlurm, clock: VirtualClock
) -> None:
    make().launch(node(), GPU)
    slurm.submit(["--comment=mine"], "")
    assert listed(make(starts_nodes=False), clock) == {}
    assert slurm.cancelled == ["1"]


def test_while_slurm_does_not_answer_nothing_is_concluded(make: Make, slurm: FakeSlurm, clock: VirtualClock) -> None:
    provider = make()
    started(provider, slurm, clock)
    slurm.is_down = True
    with pytest.raises(ClusterError, match="Slurm does not answer"):
        listed(provider, clock)
    slurm.is_down = False
    assert listed(provider, clock)["n1"].ended_at_s is None


def test_the_output_of_squeue_is_read() -> None:
    output = "12|RUNNING|1795699516|1795699816|n1|None|raytide:tide-1:n1\n13|PENDING|N/A|NONE||Priority|(null)\nbad\n"
    first, second = parse_jobs(output)
    assert (first.job_id, first.end_s, first.machine, first.has_started) == ("12", 1795699816.0, "n1", True)
    assert (second.start_s, second.end_s, second.why_pending) == (None, None, "Priority")


def test_each_node_type_of_a_cluster_without_a_cloud_has_one_source(tmp_path: Path) -> None:
    file = yaml.safe_load((Path(__file__).parents[4] / "examples" / "slurm.yaml").read_text())
    own = file["metadata"]["raytide"]
    machine = {"name": "h1", "address": "10.0.0.1", "node_type": "scavenge"}
    hosts = {"ssh": {"user": "ray"}, "machines": [machine]}
    scavenge = own["slurm"]["node_types"].pop("scavenge")
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigError, match="provider slurm has no job of node type scavenge"):
        load_cluster(tmp_path / "x.yaml")
    own["node_types"]["scavenge"]["market"] = "on-demand"
    own["hosts"] = hosts
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(file))
    assert load_cluster(tmp_path / "x.yaml").settings.owned_node_types() == {"a100x4": "slurm", "scavenge": "hosts"}
    own["slurm"]["node_types"]["scavenge"] = scavenge
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigError, match="node types of both hosts and slurm: scavenge"):
        load_cluster(tmp_path / "x.yaml")


def test_a_wrong_section_is_refused() -> None:
    section = SlurmSection.model_validate({"node_types": {"other": {}}})
    with pytest.raises(ConfigError, match=r"slurm.node_types.other has no node type of that name"):
        check_slurm(section, [GPU], where="x")
    section = SlurmSection.model_validate({"node_types": {"gpu": {}}})
    with pytest.raises(ConfigError, match="Slurm chooses machines"):
        check_slurm(section, [GPU.model_copy(update={"zones": ("a", "b")})], where="x")
    with pytest.raises(ConfigError, match="raytide decides --comment itself"):
        SlurmSection.parse({"node_types": {"gpu": {"options": ["--comment=x"]}}}, where="x")


def test_a_node_that_is_given_up_while_its_job_waits_leaves_slurms_queue(
    make: Make, slurm: FakeSlurm, clock: VirtualClock
) -> None:
    provider = make()
    provider.launch(node(), GPU)
    given_up = replace(node(), state=NodeState.TERMINATING)
    for node_id in overdue([given_up], listed(provider, clock).values()).terminate:
        provider.terminate(node_id)
    assert slurm.cancelled == ["1"]


def test_a_node_that_runs_needs_its_request_no_more(make: Make, slurm: FakeSlurm, clock: VirtualClock) -> None:
    provider = make()
    started(provider, slurm, clock)
    provider._request_file("n1").unlink()  # by a clean-up of the shared folder, or while it is not mounted
    fresh = make()
    for each in (provider, fresh):
        assert listed(each, clock)["n1"].ended_at_s is None
    assert slurm.cancelled == []
    fresh.terminate("n1")
    assert slurm.interrupted == ["1"]
    clock.advance(15)
    listed(fresh, clock)
    assert slurm.cancelled == ["1"]
