"""A replica on two nodes of a real Ray: its tokens, and what follows the end of a member."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.actors.engine.tiny import save_llama
from tests.actors.engine.vllm_cores import needs_vllm

import raytide as rt
from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.engine.backends.vllm.member import MODULE
from raytide.actors.engine.model.parallel.launcher import NATIVE_MEMBER
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.ledger.occupancy import holders

pytestmark = [pytest.mark.soak, pytest.mark.cluster]

TOKENS = 240
MODULES = frozenset({NATIVE_MEMBER, MODULE})
NATIVE = {"kind": "native", "device": "cpu", "num_blocks": 64}
VLLM = {
    "kind": "vllm",
    "dtype": "float32",
    "kv_memory_gb": 0.05,
    "max_model_len": 512,
    "vllm": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
}


def members(of: LocalCluster) -> list[psutil.Process]:
    """This cluster's processes that compute beside a replica's leader."""
    found = []
    for process in psutil.process_iter():
        try:
            is_member = not MODULES.isdisjoint(process.cmdline())
            if is_member and process.environ().get(MARK) == of.cluster_id:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("wide", NATIVE),
        ("deep", {**NATIVE, "pipeline_parallel": 2}),
        pytest.param("vllm", VLLM, marks=needs_vllm),
    ],
)
def test_a_stream_goes_on_when_a_member_of_its_replica_is_killed(
    name: str,
    engine: dict[str, object],
    tide: rt.Client,
    live: LocalCluster,
    tmp_path: Path,
    eventually: Callable[..., None],
) -> None:
    save_llama(tmp_path, max_position_embeddings=1024, hidden_size=128, intermediate_size=256)
    expected = (
        LLM(tmp_path, dtype="float32")
        .generate(["import os"], SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))[0]
        .outputs[0]
        .text
    )
    spec = ServeSpec(
        name=name,
        model=str(tmp_path),
        replicas=Replicas(min=1, max=1),
        resources={"GPU": 8},
        members=2,
        engine=engine,
    )
    tide.client.change_team("default", quota={"GPU": 24.0})
    handle = tide.serve(spec)
    try:
        handle.wait(replicas=1, timeout_s=240.0)
        (first,) = members(live)
        by_node = holders(tide.client.snapshot())  # other tests' endpoints may still be going
        held = [node_id for node_id, shares in by_node.items() if name in {each[1] for each in shares}]
        assert len(held) == 2, "each member has a node of its own"
        stream = handle.openai(timeout=240.0).completions.create(
            model=name,
            prompt="import os",
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        texts = list[str]()
        for chunk in stream:
            texts.append(chunk.choices[0].text)
            if len(texts) == 20:
                first.kill()
        assert "".join(texts) == expected
        # On a busy machine the whole answer may have been computed before the kill.
        eventually(lambda: [each.pid for each in members(live)] not in ([], [first.pid]))
    finally:
        handle.delete()
        tide.client.change_team("default", quota=None)
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED)
    eventually(lambda: members(live) == [])
