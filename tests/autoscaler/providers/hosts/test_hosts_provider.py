"""Own machines: each has one node at a time, failures cost a quarantine, and nothing runs twice or is left behind."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.autoscaler.providers.hosts.fake_machines import FakeMachines

from raytide.autoscaler.providers.base import Machine
from raytide.autoscaler.providers.hosts.provider import HostCluster, HostsProvider
from raytide.autoscaler.providers.hosts.quarantine import FIRST_S, HostQuarantine, quarantine_folder
from raytide.core.clock import VirtualClock
from raytide.core.errors import ProviderError
from raytide.core.objects.hardware.host import Host, HostsSection
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType

TYPE = NodeType(name="own", resources={"CPU": 2}, price_micro_usd_h=10_000, zones=("a", "b"))


def section(*names: str, **more: Any) -> HostsSection:
    machines = [{"name": name, "address": f"10.0.0.{n}", "node_type": "own"} for n, name in enumerate(names, 1)]
    return HostsSection.model_validate({"ssh": {"user": "ray"}, "machines": machines, **more})


def node(node_id: str, zone: str = "a") -> Node:
    return Node(node_id, "own", zone, CapacityType.ON_DEMAND, 10_000, NodeState.REQUESTED, 0.0)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def machines() -> FakeMachines:
    return FakeMachines()


Make = Callable[..., HostsProvider]


@pytest.fixture
def make(tmp_path: Path, clock: VirtualClock, machines: FakeMachines) -> Iterator[Make]:
    """Providers over one run folder, as successive controllers would have."""
    made = []

    def one(hosts: HostsSection | None = None, **options: bool) -> HostsProvider:
        cluster = HostCluster("tide-1", "10.0.0.100:6379", {})
        made.append(HostsProvider(hosts or section("h1", "h2"), [TYPE], cluster, tmp_path, clock, machines, **options))
        return made[-1]

    yield one
    for provider in made:
        provider.close()


def settled(provider: HostsProvider) -> dict[str, Machine]:
    """The machines once no thread is at work."""
    for thread in tuple(provider._at_work.values()):
        thread.join(120)
    return {machine.node_id: machine for machine in provider.machines()}


def launched(provider: HostsProvider, *node_ids: str) -> dict[str, Machine]:
    for node_id in node_ids:
        provider.launch(node(node_id), TYPE)
    return settled(provider)


def test_each_node_has_a_machine_of_its_own_in_the_files_order(make: Make, machines: FakeMachines) -> None:
    found = launched(make(), "n1", "n2")
    assert machines.running() == [("h1", "n1"), ("h2", "n2")]
    assert [found[name].address for name in ("n1", "n2")] == ["10.0.0.1", "10.0.0.2"]
    assert found["n1"].price_micro_usd_h == 10_000


def test_a_launch_that_is_repeated_starts_nothing_twice(make: Make, machines: FakeMachines) -> None:
    provider = make()
    launched(provider, "n1", "n1")
    launched(provider, "n1")
    assert machines.starts == [("h1", "n1")]


def test_without_a_free_machine_the_pool_is_out_of_stock(make: Make) -> None:
    provider = make()
    launched(provider, "n1", "n2")
    with pytest.raises(ProviderError, match="none of the 2 machines of own in a is free"):
        provider.launch(node("n3"), TYPE)
    with pytest.raises(ProviderError, match="none of the 0 machines of own in b is free"):
        provider.launch(node("n3", zone="b"), TYPE)


def test_a_machine_whose_node_ended_is_free_again(make: Make, machines: FakeMachines, clock: VirtualClock) -> None:
    provider = make(section("h1"))
    launched(provider, "n1")
    clock.advance(30)
    provider.terminate("n1")
    assert settled(provider)["n1"].ended_at_s == 1030.0
    assert launched(provider, "n2")["n2"].ended_at_s is None
    assert machines.running() == [("h1", "n2")]


def test_the_next_controller_finds_the_nodes_and_their_machines(make: Make, machines: FakeMachines) -> None:
    launched(make(), "n1", "n2")
    adopted = make()
    assert {node_id: m.address for node_id, m in settled(adopted).items()} == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    adopted.terminate("n1")
    settled(adopted)
    assert machines.running() == [("h2", "n2")]
    assert [start for start in machines.starts if start[1] == "n1"] == [("h1", "n1")]


def test_a_start_that_a_killed_controller_left_unfinished_is_finished(make: Make, machines: FakeMachines) -> None:
    first = make()
    first._begin = lambda *_: None  # type: ignore[method-assign]
    first.launch(node("n1"), TYPE)
    assert machines.running() == []
    only_ends = make(starts_nodes=False)
    settled(only_ends)
    assert machines.running() == []
    found = make()
    found.machines()
    settled(found)
    assert machines.running() == [("h1", "n1")]


def test_a_start_for_a_type_that_was_removed_is_not_finished_and_its_machine_is_free_after_the_end(
    make: Make, machines: FakeMachines
) -> None:
    first = make(section("h1"))
    first._begin = lambda *_: None  # type: ignore[method-assign]
    first.launch(node("n1"), TYPE)
    following = make(section("h1"))
    types, following._types = following._types, {}
    assert settled(following)["n1"].ended_at_s is None
    assert following._at_work == {}
    following.terminate("n1")
    assert settled(following)["n1"].ended_at_s is not None
    following._types = types
    launched(following, "n2")
    assert machines.running() == [("h1", "n2")]


@pytest.mark.parametrize("fault", ["off", "sick"])
def test_a_machine_that_fails_is_quarantined_and_the_node_gets_the_next(
    make: Make, machines: FakeMachines, fault: str
) -> None:
    getattr(machines, fault).add("h1")
    provider = make()
    assert launched(provider, "n1")["n1"].address == "10.0.0.2"
    assert machines.running() == [("h2", "n1")]
    (problem,) = provider.problems()
    assert problem.startswith("host h1 is in quarantine until ")
    assert ("cannot be reached" if fault == "off" else "ray 2.0 instead of 2.60") in problem
    assert "`raytide nodes release h1`" in problem


def test_a_machine_that_may_have_started_the_node_is_not_followed_by_another(
    make: Make, machines: FakeMachines, clock: VirtualClock
) -> None:
    """Two raylets with one id would both be the node."""
    machines.slow.add("h1")
    provider = make()
    assert "did not answer" in launched(provider, "n1")["n1"].reason
    assert machines.running() == [("h1", "n1")]
    assert launched(provider, "n2")["n2"].address == "10.0.0.2"
    provider.check_nodes()
    assert machines.running() == [("h2", "n2")]


def test_when_all_machines_fail_the_node_ends_with_the_reason(make: Make, machines: FakeMachines) -> None:
    machines.off |= {"h1", "h2"}
    provider = make()
    ended = launched(provider, "n1")["n1"]
    assert ended.ended_at_s is not None and "cannot be reached" in ended.reason
    with pytest.raises(ProviderError, match="h1, h2 in quarantine") as refused:
        provider.launch(node("n2"), TYPE)
    assert "raytide nodes release" in refused.value.hint


def test_a_quarantine_ends_by_itself_lasts_longer_each_time_and_is_forgotten_after_a_success(
    make: Make, machines: FakeMachines, clock: VirtualClock
) -> None:
    machines.sick.add("h1")
    provider = make(section("h1"))
    for failure in range(3):
        launched(provider, f"n{failure}")
        clock.advance(FIRST_S * 2**failure - 1)
        assert len(provider.problems()) == 1
        clock.advance(1)
        assert provider.problems() == ()
    machines.sick.clear()
    launched(provider, "n9")
    assert machines.running() == [("h1", "n9")]
    machines.die("h1", "n9", "its raylet ended (killed by SIGKILL)")
    provider.check_nodes()
    clock.advance(FIRST_S)
    assert provider.problems() == ()


def test_an_operators_quarantine_stays_until_it_is_lifted(make: Make, tmp_path: Path, clock: VirtualClock) -> None:
    quarantine = HostQuarantine(quarantine_folder(tmp_path), clock)
    quarantine.add("h1", "a fan is broken.", is_until_lifted=True)
    provider = make()
    clock.advance(1e6)
    assert launched(provider, "n1")["n1"].address == "10.0.0.2"
    assert provider.problems()[0].startswith("host h1 is in quarantine until it is released: a fan is broken.")
    assert quarantine.lift("h1") and not quarantine.lift("h1")
    assert launched(provider, "n2")["n2"].address == "10.0.0.1"


@pytest.mark.parametrize(
    ("reason", "is_quarantined"), [("its raylet ended", False), ("its raylet ended (killed by SIGKILL)", True)]
)
def test_a_raylet_that_was_killed_costs_its_machine_a_quarantine_a_drained_one_does_not(
    make: Make, machines: FakeMachines, reason: str, is_quarantined: bool
) -> None:
    provider = make()
    launched(provider, "n1")
    machines.die("h1", "n1", reason)
    assert provider.check_nodes() == frozenset()
    assert settled(provider)["n1"].reason == f"h1: {reason}"
    assert bool(provider.problems()) is is_quarantined


def test_a_silent_machine_keeps_its_node_until_the_node_is_given_up(make: Make, machines: FakeMachines) -> None:
    provider = make()
    launched(provider, "n1")
    machines.off.add("h1")
    provider.check_nodes()
    assert settled(provider)["n1"].ended_at_s is None
    assert "cannot be reached" in provider.problems()[0]
    provider.terminate("n1")
    assert "terminated; host h1 cannot be reached" in settled(provider)["n1"].reason
    machines.off.clear()
    assert machines.running() == [("h1", "n1")]
    make().check_nodes()  # another controller's, too
    assert machines.running() == []


def test_no_node_ends_while_the_controller_goes_through_them(
    make: Make, machines: FakeMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, is_locked = make(), list[bool]()
    end = provider._purchases.end

    def noted(node_id: str, now_s: float, reason: str) -> None:
        is_locked.append(provider._lock.locked())
        end(node_id, now_s, reason)

    monkeypatch.setattr(provider._purchases, "end", noted)
    launched(provider, "n1", "n2")
    provider.terminate("n1")
    settled(provider)
    machines.die("h2", "n2", "its raylet ended")
    provider.check_nodes()
    assert is_locked == [True, True]


def switched(said: Path, *names: str) -> HostsSection:
    """Machines whose power commands write to the file `said`."""
    argv = [sys.executable, "-c", "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + ';')", str(said)]
    return section(*names, power_on=[*argv, "on", "{name}"], power_off=[*argv, "off", "{address}"])


class Boot(threading.Event):
    """The event `closed` of a power switch. Something happens while a machine boots."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self._happens = happens

    def wait(self, timeout: float | None = None) -> bool:
        self._happens()
        return self.is_set()


def test_machines_are_switched_on_before_a_start_and_off_after_the_end(
    make: Make, machines: FakeMachines, tmp_path: Path
) -> None:
    machines.off.add("h1")
    provider = make(switched(tmp_path / "said", "h1"))
    provider._power._closed = Boot(machines.off.clear)
    launched(provider, "n1")
    assert machines.running() == [("h1", "n1")]
    provider.terminate("n1")
    settled(provider)
    assert (tmp_path / "said").read_text() == "on h1;off 10.0.0.1;"


def test_a_machine_whose_raylet_ended_by_itself_is_switched_off_before_it_is_free(
    make: Make, machines: FakeMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = make(switched(tmp_path / "said", "h1"))
    launched(provider, "n1")
    machines.die("h1", "n1", "its raylet ended")
    off = provider._power.off

    def switch_off(host: Host) -> None:
        provider.terminate("n1")  # the planner may ask for it meanwhile
        with pytest.raises(ProviderError, match="none of the 1 machines"):
            provider.launch(node("n2"), TYPE)
        off(host)

    monkeypatch.setattr(provider._power, "off", switch_off)
    assert provider.check_nodes() == frozenset()
    assert settled(provider)["n1"].reason == "h1: its raylet ended"
    assert (tmp_path / "said").read_text() == "off 10.0.0.1;"


def test_a_controller_that_ends_while_a_machine_boots_leaves_the_machine_to_the_next_one(
    make: Make, machines: FakeMachines, tmp_path: Path
) -> None:
    machines.off |= {"h1", "h2"}
    hosts = switched(tmp_path / "said", "h1", "h2")
    first = make(hosts)
    first._power._closed = Boot(first._power.close)
    assert launched(first, "n1")["n1"].ended_at_s is None
    assert first.problems() == ()
    assert (tmp_path / "said").read_text() == "on h1;"
    machines.off.clear()
    following = make(hosts)
    following.machines()
    settled(following)
    assert machines.running() == [("h1", "n1")]


def test_a_machine_whose_node_is_ended_while_it_boots_is_switched_off(
    make: Make, machines: FakeMachines, tmp_path: Path
) -> None:
    machines.off |= {"h1", "h2"}
    provider = make(switched(tmp_path / "said", "h1", "h2"))
    provider._power._closed = Boot(lambda: provider.terminate("n1"))
    assert launched(provider, "n1")["n1"].ended_at_s is None
    provider.terminate("n1")
    assert settled(provider)["n1"].ended_at_s is not None
    assert (tmp_path / "said").read_text() == "on h1;off 10.0.0.1;"


def test_a_power_command_that_fails_is_a_failure_of_the_machine(make: Make, machines: FakeMachines) -> None:
    machines.off.add("h1")
    provider = make(section("h1", power_on=[sys.executable, "-c", "import sys; sys.exit('no such BMC')"]))
    assert "no such BMC" in launched(provider, "n1")["n1"].reason


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["launch", "terminate"]), st.integers(0, 5)),
        st.tuples(st.sampled_from(["off", "on", "sick", "well", "die"]), st.integers(1, 3)),
        st.tuples(st.sampled_from(["restart", "check", "wait"]), st.just(0)),
    ),
    max_size=25,
)


@hypothesis_settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS)
def test_whatever_happens_no_node_runs_twice_and_what_has_ended_is_ended_everywhere(
    events: list[tuple[str, int]], tmp_path: Path
) -> None:
    clock, machines, run_dir = VirtualClock(0.0), FakeMachines(), tmp_path / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    hosts = section("h1", "h2", "h3")

    def fresh() -> HostsProvider:
        return HostsProvider(hosts, [TYPE], HostCluster("c", "g:1", {}), run_dir, clock, machines)

    provider = fresh()
    for event, number in events:
        name = f"h{number}"
        if event == "launch":
            with suppress(ProviderError):
                provider.launch(node(f"n{number}"), TYPE)
        elif event == "terminate":
            provider.terminate(f"n{number}")
        elif event in ("off", "sick"):
            getattr(machines, event).add(name)
        elif event in ("on", "well"):
            (machines.off if event == "on" else machines.sick).discard(name)
        elif event == "die":
            for node_id in tuple(machines.nodes[name]):
                machines.die(name, node_id, "its process was killed")
        elif event == "restart":
            provider.close()
            provider = fresh()
        elif event == "check":
            provider.check_nodes()
        clock.advance(10.0)
        settled(provider)
        running = [node_id for _, node_id in machines.running()]
        assert len(running) == len(set(running))
    machines.off.clear()
    for machine in settled(provider).values():
        provider.terminate(machine.node_id)
    settled(provider)
    for name in ("h1", "h2", "h3"):
        HostQuarantine(quarantine_folder(run_dir), clock).add(name, "asked.")
    provider = fresh()
    provider.check_nodes()
    assert machines.running() == []
    assert all(machine.ended_at_s is not None for machine in settled(provider).values())
