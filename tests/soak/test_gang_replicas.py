"""Replicas of several members on real raylets: bought whole, seated whole, booked to their endpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import raytide as rt
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.core.objects.ledger_entry import EntryKind, Occupancy, Share
from raytide.ledger.occupancy import occupancies

pytestmark = [pytest.mark.soak, pytest.mark.cluster]


def test_a_replica_of_two_members_gets_both_its_nodes_or_none(
    tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]
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
        return [node.id for node in tide.status().nodes if node.type == "gpu8"]

    def reason() -> str:
        waiting = handle.refresh().status.waiting
        return "" if waiting is None else waiting.reason

    def holders() -> list[Occupancy]:
        seen = tide.client.snapshot()
        return [held for node_id, held in occupancies(seen).items() if node_id in nodes()]

    def used() -> float:
        return next(team.use.used["GPU"] for team in tide.client.teams() if team.name == "default")

    tide.client.change_team("default", quota={"GPU": 24.0})
    with tide.gang(nodes=2, gpus=8):
        handle = tide.serve(spec)
        eventually(lambda: "2 x (8 GPU)" in reason())
        assert len(nodes()) == 2
    try:
        handle.wait(replicas=1, timeout_s=180.0)
        answer = handle.openai().completions.create(model="wide", prompt="x", max_tokens=3)
        assert answer.choices[0].finish_reason
        eventually(lambda: holders() == [(Share(EntryKind.ENDPOINT, "wide", "default", 1.0),)] * 2)
        eventually(lambda: used() == 16.0)
        assert len(nodes()) == 2, "it has those that the gang had, or their like"
        actions = [action for plan in tide.client.plans(limit=500) for action in plan["actions"]]
        assert not any(action.get("subject") == "unmanaged" for action in actions)
        eventually(lambda: handle.refresh().status.cost_micro_usd > 0)
    finally:
        handle.delete()
        tide.client.change_team("default", quota=None)
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED)
