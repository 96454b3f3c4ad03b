"""Serve's details describe an endpoint."""

from __future__ import annotations

from typing import Any

from raytide.actors.serving.ray_serve.application import DEPLOYMENT, SPANNING, Application


def replica(state: str, node_id: str | None = None) -> dict[str, Any]:
    return {"state": state, "node_id": node_id, "actor_name": f"{state} actor", "replica_id": f"id of {state}"}


def details(*replicas: dict[str, Any], status: str = "RUNNING", **said: str) -> dict[str, Any]:
    return {"status": status, "deployments": {DEPLOYMENT: {"replicas": list(replicas), "message": "it broke"}}, **said}


def nowhere(actor_name: str) -> str:
    return ""


def test_a_replica_that_starts_is_on_the_node_of_its_actor() -> None:
    there = {"STARTING actor": "ray-2"}
    seen = Application.of(details(replica("RUNNING", "ray-1"), replica("STARTING")), lambda name: there[name])
    assert (seen.ready, seen.replica_nodes) == (1, ("ray-1", "ray-2"))
    assert seen.ready_on == {"id of RUNNING": "ray-1"}


def test_a_replica_that_waits_for_a_node_has_none_and_one_that_leaves_does_not_count() -> None:
    seen = Application.of(details(replica("STARTING"), replica("STOPPING", "ray-1")), nowhere)
    assert (seen.ready, seen.replica_nodes) == (0, ())


def test_a_replica_of_several_members_is_on_the_nodes_of_its_placement_group() -> None:
    seen = details(replica("PENDING_MIGRATION", "ray-1"), replica("RUNNING", "ray-2"), replica("STARTING"))
    seen["deployments"] = {SPANNING: seen["deployments"][DEPLOYMENT]}
    groups = {"PENDING_MIGRATION actor": ("ray-1", "ray-3"), "RUNNING actor": ("ray-2", "ray-4")}
    found = Application.of(seen, nowhere, lambda name: groups.get(name, ()))
    assert (found.ready, found.replica_nodes) == (2, ("ray-1", "ray-2", "ray-3", "ray-4"))
    assert found.moving == ("ray-1", "ray-3"), "Serve moves it whole"


def test_only_what_serve_gave_up_has_failed() -> None:
    assert Application.of(details(status="UNHEALTHY"), nowhere).failure == ""
    assert Application.of(details(status="DEPLOY_FAILED", message="why"), nowhere).failure == "why\nit broke"
    assert Application.of({"status": "DEPLOY_FAILED", "deployments": {}}, nowhere).failure == "DEPLOY_FAILED"
