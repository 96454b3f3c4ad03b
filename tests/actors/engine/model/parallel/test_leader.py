"""A leader that exchanges weights with a member, of which only the connection is here."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.actors.engine.model.parallel.test_link import connected
from tests.actors.engine.tiny import save_llama

from raytide.actors.engine import EngineConfig, NativeEngine
from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.model.parallel import leader as leader_module
from raytide.actors.engine.model.parallel import link as link_module
from raytide.actors.engine.model.parallel.launcher import LocalMembers
from raytide.actors.engine.model.parallel.leader import GroupLeader, LeaderDecoder
from raytide.actors.engine.model.parallel.link import MemberLink
from raytide.core.errors import ConflictError


@pytest.fixture
def pair() -> Iterator[tuple[GroupLeader, MemberLink]]:
    """A leader and its member's end of their connection."""
    own, members = connected("s", "s")
    leader = object.__new__(GroupLeader)
    leader._links, leader._asking, leader._loads, leader.death = [own], threading.Lock(), 0, None
    leader._computation = leader._group = None  # type: ignore[assignment]
    yield leader, members
    own.close()
    members.close()


def received(leader: GroupLeader, link: MemberLink) -> list[dict[str, Any]]:
    """Returns the member's orders so far."""
    leader._order(end=True)
    orders = []
    while (order := link.receive()) != {"end": True}:
        assert isinstance(order, dict)
        orders.append(order)
    return orders


@pytest.mark.parametrize("fault", ["leader", "member"])
def test_a_load_that_fails_somewhere_leaves_its_weights_nowhere(
    pair: tuple[GroupLeader, MemberLink], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, member = pair
    save_llama(tmp_path)

    def loaded(*_: object) -> object:
        if fault == "leader":
            raise MemoryError
        return object()

    monkeypatch.setattr(leader_module, "LeaderDecoder", loaded)
    refusal = {"error": ConflictError("other weights").to_json()}
    member.send(refusal if fault == "member" else {"done": "load"})
    with pytest.raises(ConflictError if fault == "member" else MemoryError):
        leader.load(tmp_path)
    load, *rest = received(leader, member)
    assert (list(load), rest) == (["load"], [{"drop_weights": 1}])


def test_discarded_weights_are_dropped_by_the_members(pair: tuple[GroupLeader, MemberLink]) -> None:
    leader, member = pair
    model = object.__new__(LeaderDecoder)
    model._leader, model.number = leader, 7
    model.discard()
    assert received(leader, member) == [{"drop_weights": 7}]


async def test_weights_are_dropped_if_their_load_ends_after_its_caller(
    pair: tuple[GroupLeader, MemberLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, member = pair
    begun, may_end, dropped = threading.Event(), threading.Event(), asyncio.Event()
    model, loop = object.__new__(LeaderDecoder), asyncio.get_running_loop()
    model._leader, model.number = leader, 7

    def read(*_: object) -> tuple[LeaderDecoder, None]:
        begun.set()
        may_end.wait(60)
        loop.call_soon_threadsafe(loop.call_later, 0.1, dropped.set)
        return model, None

    monkeypatch.setattr(operations, "read_weights", read)
    engine = NativeEngine(EngineConfig(model_dir="nowhere"))
    engine._core = object()  # type: ignore[assignment]
    loading = asyncio.create_task(engine.load_weights("other"))
    await asyncio.to_thread(begun.wait, 60)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    may_end.set()
    await dropped.wait()
    assert received(leader, member) == [{"drop_weights": 7}]


def test_a_connection_that_stays_silent_keeps_no_member_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_HANDSHAKE_S", 60.0)
    monkeypatch.setattr(leader_module, "_COME_S", 30.0)
    launcher = LocalMembers((), local_size=2)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        address = listening.getsockname()
        with socket.create_connection(address):
            member = thread.submit(MemberLink.connect, *address, "s", 1)
            (leader,) = leader_module._accept(listening, "s", 2, launcher)
            assert leader.rank == member.result().rank == 1
    leader.close()
    member.result().close()
