"""Replicas of several members on real raylets: bought whole, seated whole, booked to their endpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import raytide as rt
from raytide.core.endpoint import EndpointState, Replicas, ServeSpec

pytestmark = [pytest.mark.soak, pytest.mark.cluster]


def test_a_replica_of_two_members_gets_both_its_nodes_or_none(
    tide: rt.Tide, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """Three nodes are all that there are: while a gang holds two of them, the replica has no room, and buys no half."""
    (tmp_path / "config.json").write_text("{}")
    spec = ServeSpec(
        name="wide",
        model=str(tmp_path),
        replicas=Replicas(min=1, max=1),
        resources={"GPU": 8},
        members=2,
        engine={"kind": "fake"},
    )

    def nodes() -> list[str]:
        return [node.subject for node in tide.status().nodes if node.type == "gpu8"]

    with tide.gang(2, resources={"GPU": 8}):
        handle = tide.serve(spec)
        eventually(lambda: handle.refresh().status.waiting is not None)
        waiting = handle.status.waiting
        assert waiting is not None and "(8 GPU)" in waiting.reason
        assert len(nodes()) == 2
    try:
        handle.wait(replicas=1, timeout_s=180.0)
        answer = handle.openai().completions.create(model="wide", prompt="x", max_tokens=3)
        assert answer.choices[0].finish_reason
        assert len(nodes()) == 2, "it has those that the gang had, or their like"
        actions = [action for plan in tide.client.plans(limit=500) for action in plan["actions"]]
        assert not any(action.get("subject") == "unmanaged" for action in actions)
        eventually(lambda: handle.refresh().status.cost_micro_usd > 0)
    finally:
        handle.delete()
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED)
