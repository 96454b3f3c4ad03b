"""The local provider with stand-in nodes: what is bought, what is billed, and that nothing is left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from raytide.autoscaler.providers.base import Machine
from raytide.autoscaler.providers.local import events
from raytide.autoscaler.providers.local.events import Watcher, poke
from raytide.autoscaler.providers.local.files import MARK, LocalMachine, NodeFolder
from raytide.autoscaler.providers.local.provider import NODE_ID_LABEL, LocalProvider
from raytide.autoscaler.providers.local.spot import give_notice, reclaim, set_stockouts
from raytide.core.clock import VirtualClock
from raytide.core.errors import NotFoundError, ProviderError
from raytide.core.io.process import Process, kill_marked, marked
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType

TYPE = NodeType(
    name="g1", resources={"CPU": 2, "GPU": 1}, market=CapacityType.SPOT, price_micro_usd_h=900_000, zones=("a", "b")
)
WAIT_S = 120.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def make(tmp_path: Path, clock: VirtualClock) -> Iterator[Callable[[], LocalProvider]]:
    """Providers over one run folder, as successive controllers would have; all nodes are gone afterwards."""
    made: list[LocalProvider] = []
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

    def provider() -> LocalProvider:
        made.append(
            LocalProvider(
                tmp_path,
                "127.0.9.1:6388",
                9,
                clock,
                temp_dir=tmp_path,
                environment={**os.environ, "PYTHONPATH": path},
                node_module="standin_node",
            )
        )
        return made[-1]

    yield provider
    for folder in (tmp_path / "nodes").iterdir():
        kill_marked(MARK, str(folder))
    for provider_ in made:
        provider_.close()


def node(node_id: str, zone: str = "a") -> Node:
    return Node(node_id, TYPE.name, zone, TYPE.market, TYPE.price_micro_usd_h, NodeState.REQUESTED, requested_at_s=0.0)


def only(provider: LocalProvider) -> Machine:
    (machine,) = provider.machines()
    return machine


def folder_of(run_dir: Path, node_id: str) -> NodeFolder:
    return NodeFolder(run_dir / "nodes" / node_id)


def process_of(run_dir: Path, node_id: str) -> Process:
    process = folder_of(run_dir, node_id).process()
    assert process is not None
    return process


def started(run_dir: Path, node_id: str) -> Process:
    """The node's process once it has its child."""
    folder = folder_of(run_dir, node_id)
    pause = threading.Event()
    while not folder.log.exists() or "up" not in folder.log.read_text():
        pause.wait(0.02)
    return process_of(run_dir, node_id)


def left_of(run_dir: Path, node_id: str) -> list[Process]:
    return marked(MARK, folder_of(run_dir, node_id).mark)


def test_a_launch_buys_a_machine_with_its_price_address_and_labels(
    make: Callable[[], LocalProvider], tmp_path: Path
) -> None:
    provider = make()
    provider.launch(node("n1", "b"), TYPE)
    assert only(provider) == Machine("n1", "g1", "b", 900_000, started_at_s=1000.0, address="127.0.9.2")
    purchase = folder_of(tmp_path, "n1").machine()
    assert purchase is not None
    assert purchase.resources == {"CPU": 2, "GPU": 1}
    assert purchase.labels == {**TYPE.all_labels("b"), NODE_ID_LABEL: "n1"}
    assert process_of(tmp_path, "n1").alive


def test_the_same_node_is_never_bought_twice(
    make: Callable[[], LocalProvider], tmp_path: Path, clock: VirtualClock
) -> None:
    first = make()
    first.launch(node("n1"), TYPE)
    process = process_of(tmp_path, "n1")
    clock.advance(5.0)
    first.launch(node("n1"), TYPE)
    make().launch(node("n1"), TYPE)
    assert process_of(tmp_path, "n1") == process
    assert only(first).started_at_s == 1000.0


def test_a_purchase_whose_controller_was_killed_before_it_started_anything_is_completed(
    make: Callable[[], LocalProvider], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(LocalProvider, "_spawn", killed)
        with pytest.raises(SystemExit):
            make().launch(node("n1"), TYPE)
    second = make()
    second.launch(node("n1"), TYPE)
    assert process_of(tmp_path, "n1").alive
    assert only(second).ended_at_s is None


def test_a_purchase_that_nobody_completes_is_billed_until_it_is_seen(
    make: Callable[[], LocalProvider], clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalProvider, "_spawn", lambda *args: None)
    provider = make()
    provider.launch(node("n1"), TYPE)
    clock.advance(2.0)
    machine = only(provider)
    assert (machine.started_at_s, machine.ended_at_s) == (1000.0, 1002.0)


def test_an_ended_node_is_not_started_again(make: Callable[[], LocalProvider], tmp_path: Path) -> None:
    provider = make()
    provider.launch(node("n1"), TYPE)
    provider.terminate("n1")
    provider.close()
    provider.launch(node("n1"), TYPE)
    assert not process_of(tmp_path, "n1").alive


def test_nodes_have_addresses_of_their_own_and_do_not_take_a_dead_ones_at_once(
    make: Callable[[], LocalProvider],
) -> None:
    provider = make()
    for name in ("n1", "n2"):
        provider.launch(node(name), TYPE)
    provider.terminate("n1")
    provider.close()
    provider.launch(node("n3"), TYPE)
    assert [machine.address for machine in provider.machines()] == ["127.0.9.2", "127.0.9.3", "127.0.9.4"]


def test_terminate_leaves_nothing_of_the_node(
    make: Callable[[], LocalProvider], tmp_path: Path, clock: VirtualClock
) -> None:
    provider = make()
    provider.launch(node("n1"), TYPE)
    started(tmp_path, "n1")
    assert len(left_of(tmp_path, "n1")) == 2
    clock.advance(60.0)
    provider.terminate("n1")
    provider.close()
    assert left_of(tmp_path, "n1") == []
    machine = only(provider)
    assert (machine.ended_at_s, machine.reason) == (1060.0, "terminated")


def test_a_thread_that_has_ended_a_node_is_forgotten(make: Callable[[], LocalProvider]) -> None:
    provider = make()
    for node_id in ("n1", "n2"):
        provider.launch(node(node_id), TYPE)
        provider.terminate(node_id)
        provider._ending[node_id].join()
    assert [*provider._ending] == ["n2"]


def test_terminating_what_was_never_bought_does_nothing(make: Callable[[], LocalProvider]) -> None:
    provider = make()
    provider.terminate("n1")
    assert provider.machines() == ()


def test_a_node_outlives_its_provider_and_the_next_one_ends_it(
    make: Callable[[], LocalProvider], tmp_path: Path
) -> None:
    make().launch(node("n1"), TYPE)
    process = started(tmp_path, "n1")
    second = make()
    assert only(second).ended_at_s is None
    second.terminate("n1")
    second.close()
    assert not process.alive
    assert left_of(tmp_path, "n1") == []


def test_the_first_to_see_an_end_writes_the_bill_for_all(
    make: Callable[[], LocalProvider], tmp_path: Path, clock: VirtualClock
) -> None:
    first, second = make(), make()
    second.launch(node("n1"), TYPE)
    process = started(tmp_path, "n1")
    clock.advance(7.0)
    process.send(signal.SIGKILL)
    process.wait(WAIT_S)
    seen = only(first)
    clock.advance(100.0)
    assert seen.ended_at_s == 1007.0
    assert only(second) == only(make()) == seen
    assert left_of(tmp_path, "n1") == []


def test_a_death_is_reported_at_once(make: Callable[[], LocalProvider], tmp_path: Path) -> None:
    make().launch(node("n1"), TYPE)
    changed = threading.Event()
    second = make()
    second.watch(changed.set)
    second.launch(node("n2"), TYPE)
    process_of(tmp_path, "n1").send(signal.SIGKILL)
    assert changed.wait(WAIT_S)
    changed.clear()
    process_of(tmp_path, "n2").send(signal.SIGKILL)
    assert changed.wait(WAIT_S)


def test_two_controllers_that_watch_for_a_moment_do_not_end_each_other_s_watch(
    make: Callable[[], LocalProvider], tmp_path: Path
) -> None:
    providers = [make(), make()]
    for provider in providers:
        provider.watch(lambda: None)
    for _ in range(2000):
        poke(tmp_path)
    watchers = [provider._watcher for provider in providers]
    assert all(watcher is not None and watcher._thread.is_alive() for watcher in watchers)


def test_a_watcher_that_ends_while_it_is_woken_fails_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nodes").mkdir()
    watcher, write = Watcher(tmp_path, lambda: None), os.write

    def write_late(fd: int, data: bytes) -> int:
        watcher.close()
        return write(fd, data)

    monkeypatch.setattr(events, "os", SimpleNamespace(**{**vars(os), "write": write_late}))
    poke(tmp_path)
    assert not watcher._thread.is_alive()


def test_a_notice_is_reported_and_stands_until_the_node_ends(make: Callable[[], LocalProvider], tmp_path: Path) -> None:
    provider = make()
    provider.launch(node("n1"), TYPE)
    changed = threading.Event()
    provider.watch(changed.set)
    give_notice(tmp_path, "n1", 1120.0)
    assert changed.wait(WAIT_S)
    assert [(notice.node_id, notice.deadline_s) for notice in provider.notices()] == [("n1", 1120.0)]
    reclaim(tmp_path, "n1")
    assert provider.notices() == ()


def test_a_reclaim_takes_the_whole_node_at_once(
    make: Callable[[], LocalProvider], tmp_path: Path, clock: VirtualClock
) -> None:
    provider = make()
    provider.launch(node("n1"), TYPE)
    started(tmp_path, "n1")
    clock.advance(30.0)
    reclaim(tmp_path, "n1", clock=clock)
    assert left_of(tmp_path, "n1") == []
    machine = only(provider)
    assert (machine.ended_at_s, machine.reason) == (1030.0, "reclaimed")


def test_notice_and_reclaim_name_an_unknown_node(make: Callable[[], LocalProvider], tmp_path: Path) -> None:
    make()
    with pytest.raises(NotFoundError, match="no node n9"):
        give_notice(tmp_path, "n9", 0.0)
    with pytest.raises(NotFoundError, match="no node n9"):
        reclaim(tmp_path, "n9")


def test_a_pool_out_of_stock_refuses_until_it_is_restocked(make: Callable[[], LocalProvider], tmp_path: Path) -> None:
    provider = make()
    set_stockouts(tmp_path, [("g1", "a")])
    with pytest.raises(ProviderError, match="no g1 to be had in a"):
        provider.launch(node("n1", "a"), TYPE)
    assert provider.machines() == ()
    provider.launch(node("n2", "b"), TYPE)
    set_stockouts(tmp_path, [("g1", "*")])
    with pytest.raises(ProviderError, match="no g1 to be had in b"):
        provider.launch(node("n3", "b"), TYPE)
    set_stockouts(tmp_path, [])
    provider.launch(node("n1", "a"), TYPE)
    assert {machine.node_id for machine in provider.machines()} == {"n1", "n2"}


def test_a_node_that_has_ended_is_read_once_and_billed_for_ever(
    make: Callable[[], LocalProvider], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    machine_of = NodeFolder.machine

    def machine(folder: NodeFolder) -> LocalMachine | None:
        read.append(folder.node_id)
        return machine_of(folder)

    provider = make()
    for number in range(20):
        folder = folder_of(tmp_path, f"old-{number:02}")
        folder.path.mkdir()
        folder.buy(provider._purchase(node(folder.node_id), TYPE))
        folder.record_end(1001.0)
    provider.launch(node("n1"), TYPE)
    first = provider.machines()
    monkeypatch.setattr(NodeFolder, "machine", machine)
    assert provider.machines() == first == make().machines()
    assert len(first) == 21
    read.clear()
    provider.machines()
    provider.notices()
    assert read == ["n1"]
