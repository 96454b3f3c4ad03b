"""A replica of vLLM on two nodes: the engine's process on one, and a member that another process owns."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.actors.engine.tiny import save_llama
from tests.actors.engine.vllm_cores import needs_vllm

from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.model.parallel.launcher import Invitation, LocalMembers
from raytide.actors.engine.types import GenRequest
from raytide.actors.serving.engine_child import EngineChild
from raytide.actors.serving.engines import member_module
from raytide.core.errors import EngineDeadError
from raytide.core.objects.endpoint import ServeSpec

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Node:
    """The other node of a replica."""

    def __init__(self, spec: ServeSpec, model_dir: Path) -> None:
        module, options = member_module(spec)
        self.members = LocalMembers([1], local_size=1, model_dir=str(model_dir), module=module, options=options)

    async def bring(self, invitation: Invitation) -> None:
        self.members.launch(invitation)


def children(module: str) -> list[psutil.Process]:
    """Returns this process' own children that run a module."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it ended, and is a zombie or gone
            if module in child.cmdline():
                found.append(child)
    return found


async def test_two_nodes_compute_what_one_does_and_end_together(tmp_path: Path) -> None:
    for copy in ("here", "there"):
        (tmp_path / copy).mkdir()
        save_llama(tmp_path / copy, hidden_size=128, intermediate_size=256)
    engine = {"kind": "vllm", "dtype": "float32", "kv_memory_gb": 0.05, "max_model_len": 128}
    spec = ServeSpec(name="m", model=str(tmp_path / "here"), members=2, engine=engine)
    node = Node(spec, tmp_path / "there")
    child = await EngineChild.start(spec, "127.0.0.1", "r", model_dir=spec.model, bring_members=node.bring)
    try:
        request = GenRequest(request_id="1", prompt=[5, 6, 7], sampling=GREEDY)
        tokens = [token async for chunk in child.engine.generate(request) for token in chunk.token_ids]
        assert tokens == LLM(tmp_path / "here").generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
        other = RemoteEngine("127.0.0.1", child.port, child.secret, name="r")
        assert "weights_swap" not in (await other.start()).features, "other nodes may not have the new weights"
        await other.shutdown()

        (member,) = children("raytide.actors.engine.backends.vllm.member")
        workers = member.children(recursive=True)
        assert workers
        assert node.members.problem() is None
        member.kill()
        await asyncio.to_thread(psutil.wait_procs, workers, 60)
        assert not [worker for worker in workers if worker.is_running()]
        assert "member 1 ended" in str(node.members.problem())
        with pytest.raises(EngineDeadError):
            async for _ in child.engine.generate(GenRequest(request_id="2", prompt=[5, 6], sampling=GREEDY)):
                pass
    finally:
        await child.stop(0.0)
        node.members.stop()
    assert children("raytide.actors.serving.engine_process") == []
