"""A replica of the native engine on two nodes of a real Ray: its tokens, and what follows the end of a member."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.actors.engine.tiny import save_llama

import raytide as rt
from raytide.actors.engine import LLM, SamplingParams
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.ledger.occupancy import occupancies

pytestmark = [pytest.mark.soak, pytest.mark.cluster]

TOKENS = 240


def members(of: LocalCluster) -> list[psutil.Process]:
    """This cluster's processes that compute beside a replica's leader."""
    found = []
    for process in psutil.process_iter():
        try:
            is_member = "raytide.actors.engine.model.parallel.member" in process.cmdline()
            if is_member and process.environ().get(MARK) == of.cluster_id:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("options", [{}, {"pipeline_parallel": 2}], ids=["heads", "layers"])
def test_a_stream_goes_on_when_a_member_of_its_replica_is_killed(
    options: dict[str, int], tide: rt.Client, live: LocalCluster, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    save_llama(tmp_path, max_position_embeddings=1024)
    name = "deep" if options else "wide"
    expected = (
        LLM(tmp_path)
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
        engine={"kind": "native", "device": "cpu", "num_blocks": 64, **options},
    )
    tide.client.change_team("default", quota={"GPU": 24.0})
    handle = tide.serve(spec)
    try:
        handle.wait(replicas=1, timeout_s=240.0)
        (first,) = members(live)
        held = [node_id for node_id, shares in occupancies(tide.client.snapshot()).items() if shares]
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
        (second,) = members(live)
        assert second.pid != first.pid
    finally:
        handle.delete()
        tide.client.change_team("default", quota=None)
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED)
    eventually(lambda: members(live) == [])
