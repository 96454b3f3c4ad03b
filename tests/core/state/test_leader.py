"""Two controllers on one store, on SQLite and on PostgreSQL: one decides, and one that was replaced writes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from raytide.core.errors import ConflictError
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.state import Changes, Store
from raytide.core.state.leader import LEASE_S, Leader


class Hand:
    """A monotonic clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(Leader.__init__, "__defaults__", (hand,))
    return hand


@pytest.fixture
def stores(url: str) -> Iterator[tuple[Store, Store]]:
    with ExitStack() as stack:
        opened = [Store.open(url) for _ in range(2)]
        for store in opened:
            stack.callback(store.close)
        yield opened[0], opened[1]


def changes(number: int) -> Changes:
    node = Node(f"node-{number}", "cpu2", "local", CapacityType.ON_DEMAND, 1, NodeState.REQUESTED, 1.0)
    return Changes(1.0, nodes=(node,))


def test_the_second_waits_while_the_first_commits(stores: tuple[Store, Store], hand: Hand) -> None:
    first, second = stores
    assert first.lead("a") == ""
    for number in range(40):
        hand.now_s += LEASE_S / 10
        first.commit(changes(number + 1))
        assert second.lead("b") == "a"
    assert len(first.nodes()) == 40


def test_the_first_is_fenced_off_once_the_second_took_over(stores: tuple[Store, Store], hand: Hand) -> None:
    first, second = stores
    first.lead("a")
    first.commit(changes(1))
    assert second.lead("b") == "a"
    hand.now_s += LEASE_S - 1.0
    assert second.lead("b") == "a"
    hand.now_s += 1.0
    assert second.lead("b") == "", "the first has stood still"
    with pytest.raises(ConflictError, match="was replaced: b leads"):
        first.commit(changes(2))
    with pytest.raises(ConflictError, match="was replaced"):
        first.check_lead()
    assert [node.id for node in second.nodes()] == ["node-1"], "nothing of it was written"
    second.commit(changes(2))
    second.check_lead()
    assert first.lead("a") == "b", "it may wait for its turn"


def test_one_that_stands_still_and_comes_back_first_keeps_the_lead(stores: tuple[Store, Store], hand: Hand) -> None:
    first, second = stores
    first.lead("a")
    second.lead("b")
    hand.now_s += LEASE_S - 1.0
    first.check_lead()
    hand.now_s += LEASE_S - 1.0
    assert second.lead("b") == "a"
    first.commit(changes(1))


def test_its_own_successor_and_the_next_after_an_orderly_end_do_not_wait(stores: tuple[Store, Store]) -> None:
    first, second = stores
    first.lead("a")
    assert second.lead("a") == "", "it was killed and started again"
    with pytest.raises(ConflictError):
        first.commit(changes(1))
    first.resign()
    second.commit(changes(1))
    second.resign()
    assert first.lead("c") == ""


def test_a_store_without_a_lead_is_not_fenced(stores: tuple[Store, Store]) -> None:
    first, second = stores
    first.commit(changes(1))
    second.commit(changes(2))
    assert len(first.nodes()) == 2


def test_of_two_that_begin_at_once_one_leads(stores: tuple[Store, Store]) -> None:
    barrier, found = threading.Barrier(2), []

    def begin(store: Store, holder: str) -> None:
        barrier.wait()
        found.append(store.lead(holder))

    threads = [threading.Thread(target=begin, args=args) for args in zip(stores, "ab", strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found)[0] == ""
    assert sorted(found)[1] in ("a", "b", "another controller")


def test_threads_whose_renewal_is_due_at_once_do_not_wait_for_each_other(
    stores: tuple[Store, Store], hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's tick commits while its thread for Ray Serve asks whether it still leads."""
    first, _ = stores
    first.lead("a")
    hand.now_s += LEASE_S - 1.0
    both, renew = threading.Barrier(2), Leader._update

    def renew_together(*args: Any, **values: object) -> None:
        with suppress(threading.BrokenBarrierError):  # the other one waits for this one's commit
            both.wait(0.5)
        renew(*args, **values)

    monkeypatch.setattr(Leader, "_update", renew_together)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(first.commit, changes(1)), threads.submit(first.check_lead)]:
            done.result(30)
    assert len(first.nodes()) == 1


def test_the_replaced_one_is_caught_in_the_middle_of_its_pass(stores: tuple[Store, Store], hand: Hand) -> None:
    """Both loaded, the slow one commits last."""
    slow, other = stores
    slow.lead("slow")
    other.lead("other")
    slow.load()
    hand.now_s += LEASE_S
    other.lead("other")
    other.commit(changes(1))
    with pytest.raises(ConflictError):
        slow.commit(changes(1))
    assert [node.state for node in other.nodes()] == [NodeState.REQUESTED]
