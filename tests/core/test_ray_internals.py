"""Some of Ray's own functions are replaced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from raytide.core.ray_internals import hush_node_deaths, start_raylet

NODE = "ab" * 28


def test_drivers_print_nothing_of_raylets_that_end_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray._private import worker

    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    hush_node_deaths()
    printer = worker.listen_error_messages.__globals__["print_to_stdstream"]
    printer({"lines": ["Raylet is terminated"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capsys.readouterr().out == ""


def test_a_raylet_that_takes_long_to_join_is_not_given_up_and_waits_for_no_agent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ray._private import node, services

    def late(gcs_address: str, node_id: str) -> dict[str, int]:
        raise RuntimeError("RPC error: Deadline Exceeded")

    class Node:
        """As far as Ray's own waits for the node."""

        def __init__(self, params: object, **more: object) -> None:
            joined = services.get_node("127.0.0.1:6379", "id")
            self.port = joined["node_manager_port"] + joined["runtime_env_agent_port"] + joined["metrics_agent_port"]
            self.port += joined["metrics_export_port"] + joined["dashboard_agent_listen_port"]
            self.node_id = NODE
            self.all_processes = {"raylet": [SimpleNamespace(process=SimpleNamespace(pid=7))]}

        def get_session_dir_path(self) -> str:
            return str(tmp_path)

    monkeypatch.setattr(services, "get_node", late)
    monkeypatch.setattr(node, "Node", Node)
    assert start_raylet({"dashboard_agent_listen_port": 10_102}) == 7
    assert services.get_node is late
    assert (tmp_path / f"dashboard_agent_listen_port_{NODE}").read_text() == "10102"
