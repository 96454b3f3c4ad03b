"""Two heads on one state: one decides, and one that was replaced does nothing any more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.control.test_controller import Loop
from tests.stores import new_store

from raytide.control.accounting.final_accounting import sole_lead
from raytide.control.reconcile.retry_loop import wait_for_lead
from raytide.control.reconcile.serve_sync import ServeSync
from raytide.core.clock import VirtualClock
from raytide.core.errors import ConflictError
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.job import JobState
from raytide.core.state import Store
from raytide.core.state.leader import LEASE_S, Leader


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The monotonic clock of both."""
    clock = VirtualClock()
    monkeypatch.setattr(Leader.__init__, "__defaults__", (clock.now_s,))
    return clock


def test_a_controller_that_was_replaced_buys_nothing_and_stops(loop: Loop, other: Store, hand: VirtualClock) -> None:
    assert loop.store.lead("a") == ""
    job = loop.submit()
    assert other.lead("b") == "a"
    hand.advance(LEASE_S)
    assert other.lead("b") == ""
    with pytest.raises(ConflictError, match="was replaced"):
        loop.controller.run()
    assert loop.world.launches == []
    assert other.job(job).state is JobState.QUEUED


def test_one_that_is_replaced_between_its_commit_and_its_deeds_does_none(
    loop: Loop, other: Store, hand: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.store.lead("a")
    loop.submit()
    commit = loop.store.commit

    def stopped_after(changes: object) -> None:
        commit(changes)  # type: ignore[arg-type]
        other.lead("b")
        hand.advance(LEASE_S)
        assert other.lead("b") == ""

    monkeypatch.setattr(loop.store, "commit", stopped_after)
    with pytest.raises(ConflictError, match="was replaced"):
        loop.controller.tick()
    assert loop.world.launches == []


def test_one_that_is_replaced_between_two_deeds_does_not_do_the_second(
    loop: Loop, other: Store, hand: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process does that was stopped in the middle of a call, and wakes up when another one leads."""
    loop.store.lead("a")
    loop.submit(members=6)  # more than one node
    launch = loop.controller._sources.provider.launch
    woken = []

    def stopped_in(node: object, node_type: object) -> None:
        launch(node, node_type)  # type: ignore[arg-type]
        if not woken:
            other.lead("b")
            hand.advance(LEASE_S)
            woken.append(other.lead("b"))

    monkeypatch.setattr(loop.controller._sources.provider, "launch", stopped_in)
    with pytest.raises(ConflictError, match="was replaced"):
        loop.controller.tick()
    assert woken == [""]
    assert len(loop.world.launches) == 1
    assert len(other.nodes()) > 1, "it had decided to buy more, which is now the other one's to do"


def test_one_that_was_replaced_changes_nothing_in_serve(loop: Loop, other: Store, hand: VirtualClock) -> None:
    loop.store.lead("a")
    changed: list[str] = []

    class Control:
        def applications(self) -> dict[str, object]:
            return {}

        def __getattr__(self, name: str) -> object:
            return lambda *_, **__: changed.append(name)

    sync = ServeSync(Control(), loop.store.check_lead)  # type: ignore[arg-type]
    endpoint = loop.store.save_endpoint(
        ServeSpec(name="chat", model="/models/chat", resources={"CPU": 1.0}), "ana", now_s=1.0
    )
    other.lead("b")
    hand.advance(LEASE_S)
    assert other.lead("b") == ""
    done = sync._run_pass((endpoint,), {})
    assert changed == []
    assert "was replaced" in done.errors[0]


def test_the_second_says_for_whom_it_waits_and_begins_when_the_first_ends(
    tmp_path: Path, other: Store, loop: Loop
) -> None:
    loop.store.lead("head-1")
    shown = []

    class Clock(VirtualClock):
        def sleep(self, seconds: float) -> None:
            shown.append(json.loads((tmp_path / "waits.json").read_text())["errors"][0])
            loop.store.resign()

    wait_for_lead(other, "head-2", Clock(5.0), tmp_path / "waits.json")
    assert len(shown) == 1
    assert "head-1 leads on the same state" in shown[0]


def test_the_end_of_one_cluster_leaves_the_records_of_the_other_alone(loop: Loop, other: Store) -> None:
    loop.store.lead("head-1")
    with pytest.raises(ConflictError, match="head-1 leads"), sole_lead(other, "head-2"):
        raise AssertionError("it must not get here")
    loop.store.resign()
    with sole_lead(other, "head-2"):
        assert loop.store.lead("head-1") == "head-2"
    assert loop.store.lead("head-1") == ""
