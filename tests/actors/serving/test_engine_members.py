"""A replica of two members: the engine's process with the leader, and a member that another process owns."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from tests.actors.engine.tiny import save_llama

from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.engine.model.parallel.launcher import Invitation, LocalMembers
from raytide.actors.engine.types import GenRequest
from raytide.actors.serving.engine_child import EngineChild, _answer
from raytide.core.errors import EngineDeadError, EngineError
from raytide.core.objects.endpoint import ServeSpec

ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


class Node:
    """The other node of a replica."""

    def __init__(self, model_dir: Path) -> None:
        self.members = LocalMembers([1], local_size=1, model_dir=str(model_dir))

    async def bring(self, invitation: Invitation) -> None:
        self.members.launch(invitation)


def processes(module: str) -> list[psutil.Process]:
    """Returns this process' own children: engines of a cluster that another test keeps are further down."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it ended; what another test started may be a zombie for long
            if any(module in word for word in child.cmdline()):
                found.append(child)
    return found


@pytest_asyncio.fixture
async def replica(tmp_path: Path) -> AsyncIterator[EngineChild]:
    for copy in ("here", "there"):
        (tmp_path / copy).mkdir()
        save_llama(tmp_path / copy)
    spec = ServeSpec(name="m", model=str(tmp_path / "here"), members=2, engine={"kind": "native", "device": "cpu"})
    node = Node(tmp_path / "there")
    child = await EngineChild.start(spec, "127.0.0.1", "r", model_dir=spec.model, bring_members=node.bring)
    try:
        yield child
    finally:
        await child.stop(0.0)
        node.members.stop()
        assert processes("parallel.member") + processes("engine_process") == []


async def test_a_killed_member_ends_its_replica(replica: EngineChild, tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    request = GenRequest(request_id="1", prompt=[5, 6, 7], sampling=greedy)
    tokens = [token async for chunk in replica.engine.generate(request) for token in chunk.token_ids]
    assert tokens == LLM(tmp_path / "here").generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids
    (member,), (engine,) = processes("parallel.member"), processes("engine_process")

    async def read_and_kill() -> None:
        for number in itertools.count(2):  # a whole answer may have come before the first of its chunks was read
            request = GenRequest(request_id=str(number), prompt=[5, 6, 7], sampling=ENDLESS)
            async for chunk in replica.engine.generate(request):
                if chunk.token_ids and member.is_running():
                    member.kill()

    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(read_and_kill(), 180)
    await asyncio.to_thread(engine.wait, 180)
    assert replica.problem() is not None


async def test_a_member_ends_when_its_leader_is_killed(replica: EngineChild) -> None:
    (member,), (engine,) = processes("parallel.member"), processes("engine_process")
    engine.kill()
    await asyncio.to_thread(member.wait, 180)


async def test_members_that_cannot_come_end_the_start_at_once() -> None:
    async def bring(_: Invitation) -> None:
        raise EngineError("no room on node 2.", hint="Wait.")

    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as report:
        invitation = {"host": "127.0.0.1", "port": 1, "secret": "s", "size": 2}
        report.write(json.dumps({"phase": "load"}).encode() + b"\n")
        report.write(json.dumps({"members": invitation}).encode() + b"\n")
        report.flush()
        with pytest.raises(EngineError, match="no room on node 2"):
            await asyncio.wait_for(_answer(reading, lambda phase: None, bring), 60)
