"""What raytide uses of Ray that is not Ray's public API, all in one place. Checked against ray 2.60.

A new Ray is checked here. Nothing is imported before it is used. Only serving/policy.py has a private import of its
own: Serve runs it by value, where raytide may not be installed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

GcsClient = Any
"""ray._raylet.GcsClient, which is compiled and has no types."""


def gcs_client(address: str, *, timeout_s: float = 5.0) -> GcsClient:
    """A client without a driver's connection. OSError when nobody listens there: Ray's own would block for 40 s."""
    from ray import _raylet

    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s):
        return _raylet.GcsClient(address=address)  # type: ignore[attr-defined]


def gcs_address_here() -> str:
    """The cluster that this machine belongs to: RAY_ADDRESS, else what `ray start` noted here; empty when neither."""
    from ray._private.services import canonicalize_bootstrap_address, find_bootstrap_address

    address = os.environ.get("RAY_ADDRESS") or find_bootstrap_address(None)
    return (canonicalize_bootstrap_address(address) or "") if address else ""


def dashboard_url(client: GcsClient) -> str:
    """Where Ray's dashboard listens, with the job service; empty while it starts."""
    from ray._private import ray_constants

    key, namespace = ray_constants.DASHBOARD_ADDRESS.encode(), ray_constants.KV_NAMESPACE_DASHBOARD
    address = client.internal_kv_get(key, namespace, 5.0)
    return f"http://{address.decode()}" if address else ""


def connected_gcs() -> GcsClient:
    """This process's own client, after `ray.init`."""
    from ray._private.worker import global_worker

    worker: Any = global_worker
    worker.check_connected()
    return worker.gcs_client


def is_without_ray() -> bool:
    """Whether Ray would start a cluster of its own in this process when it is used."""
    import ray

    return not ray.is_initialized() and "RAY_ADDRESS" not in os.environ


def hush_node_deaths() -> None:
    """Ray prints on the stdout of every driver, also with `log_to_driver=False`, the last lines of each raylet that
    ends anywhere in the cluster. Ours know of their nodes by their leases, and what they print is their user's."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None


def use_ray_at(environment: Mapping[str, str]) -> None:
    """Ray will connect to what this says; it reads whether there are tokens when it is imported, and here again."""
    from ray import _raylet

    os.environ.update(environment)
    _raylet.Config.initialize("")  # type: ignore[attr-defined]


def autoscaler_messages() -> Any:
    """Ray's generated protobuf module, whose classes are made at import and have no types."""
    from ray.core.generated import autoscaler_pb2

    return autoscaler_pb2


def label_in_operator() -> int:
    from ray.core.generated import common_pb2

    return int(common_pb2.LabelSelectorOperator.LABEL_OPERATOR_IN)  # type: ignore[attr-defined]


def combine_bundles(requests: Iterable[Any]) -> list[Any]:
    """The bundles of a placement group with those that must share a node (STRICT_PACK) as one."""
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    return list(ResourceRequestUtil.combine_requests_with_affinity(list(requests)))


def strict_pack() -> int:
    from ray.core.generated import common_pb2

    return int(common_pb2.PlacementStrategy.STRICT_PACK)  # type: ignore[attr-defined]


def serve_controller() -> Any:
    """The handle of Serve's controller; ValueError when Serve does not run."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def replica_node(actor_name: str) -> str:
    """Ray's id of the node on which a replica of Serve starts, which Serve itself says only later; empty if nowhere."""
    import ray
    from ray._private import state
    from ray.serve._private.constants import SERVE_NAMESPACE

    try:
        actor: Any = ray.get_actor(actor_name, namespace=SERVE_NAMESPACE)
    except ValueError:
        return ""
    known = state.actors(actor._actor_id.hex()) or {}
    return str(known["Address"]["NodeID"]) if known.get("Pid") else ""  # while it waits, the node is one that was asked


def nodes_of_groups() -> dict[str, tuple[str, ...]]:
    """By the name of each placement group that Ray has not removed: Ray's ids of the nodes on which its bundles are."""
    from ray.util.placement_group import placement_group_table

    return {
        info["name"]: tuple(str(node) for node in info["bundles_to_node_id"].values() if node)
        for info in placement_group_table().values()
        if info["state"] != "REMOVED"
    }


_NODE_PORTS = (
    "node_manager_port",
    "runtime_env_agent_port",
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
)
"""What Ray asks of a node that joined."""


def start_raylet(parameters: Mapping[str, Any]) -> int:
    """Start a node's raylet with these RayParams and return its pid at once; it joins the cluster a few seconds later.

    Two `ray start` in one second pick the same socket name, which it cannot set, and one of them dies. Ray would wait
    for the node to join, and end it after 30 s: a busy machine may take longer, and whoever bought it waits anyhow. And
    it does not tell the raylet on which port the dashboard's agent will listen, though it is told: the raylet would
    wait for the agent to say so, and abort after 15 s.
    """
    from ray import _raylet
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    ray_services: Any = services
    raylet: Any = _raylet
    wait, ray_services.get_node = ray_services.get_node, lambda *_: dict.fromkeys(_NODE_PORTS, 0)
    try:
        node = Node(RayParams(**parameters), head=False, shutdown_at_exit=False, spawn_reaper=True)
    finally:
        ray_services.get_node = wait
    if port := parameters.get("dashboard_agent_listen_port"):
        folder = node.get_session_dir_path()
        raylet.persist_port(folder, node.node_id, raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
    return int(node.all_processes["raylet"][0].process.pid)


NODE_KIND_TAG, NODE_TYPE_TAG, _STATUS_TAG = "ray-node-type", "ray-user-node-type", "ray-node-status"


def prepared_config(file: Mapping[str, Any]) -> dict[str, Any]:
    """cluster.yaml with Ray's defaults filled in. Nothing is asked of the cloud and nothing is made there."""
    from ray.autoscaler._private.util import prepare_config

    prepared: dict[str, Any] = prepare_config(dict(file))
    return prepared


def set_up_head(cloud: Any, config: Mapping[str, Any]) -> None:
    """What `ray up` does to the head, on the machines of this NodeProvider."""
    from ray.autoscaler._private.commands import get_or_create_head_node

    get_or_create_head_node(dict(config), "cluster.yaml", False, False, True, None, _provider=cloud)


def with_environment(command: str, variables: Mapping[str, Any]) -> str:
    """The command as Ray's updater sends it."""
    from ray.autoscaler._private.command_runner import _with_environment_variables

    return str(_with_environment_variables(command, dict(variables)))


def node_provider(section: Mapping[str, Any], cluster_name: str) -> Any:
    """The NodeProvider of a `provider` section; a new one each time, since Ray's cache has only one for each type."""
    from ray.autoscaler._private.providers import _get_node_provider

    return _get_node_provider(dict(section), cluster_name, use_cache=False)


def worker_tags(config: Mapping[str, Any], node_type: str) -> dict[str, str]:
    """What Ray's own autoscaler tags a new worker with, so that `ray down` and `ray exec` know it."""
    from ray.autoscaler import tags
    from ray.autoscaler._private.util import hash_launch_conf

    node_config = config["available_node_types"][node_type].get("node_config", {})
    return {
        tags.TAG_RAY_NODE_NAME: f"ray-{config['cluster_name']}-worker",
        tags.TAG_RAY_NODE_KIND: tags.NODE_KIND_WORKER,
        tags.TAG_RAY_USER_NODE_TYPE: node_type,
        tags.TAG_RAY_NODE_STATUS: tags.STATUS_UNINITIALIZED,
        tags.TAG_RAY_LAUNCH_CONFIG: hash_launch_conf(node_config, config["auth"]),
    }


def is_set_up(tags: Mapping[str, str]) -> bool:
    return tags.get(_STATUS_TAG) == "up-to-date"


def set_up_worker(
    cloud: Any, config: Mapping[str, Any], cloud_id: str, node_type: str, commands: list[str], process_runner: Any
) -> None:
    """Files, initialization, set-up and these start commands, over ssh; raises what failed."""
    from ray.autoscaler._private.updater import NodeUpdater
    from ray.autoscaler._private.util import hash_runtime_conf

    raw = config["available_node_types"][node_type]
    files, synced = config["file_mounts"], config["cluster_synced_files"]
    init = config["initialization_commands"]
    set_up = raw.get("worker_setup_commands", config["worker_setup_commands"])
    runtime_hash, contents_hash = hash_runtime_conf(files, synced, [init, set_up, commands])
    updater = NodeUpdater(
        node_id=cloud_id,
        provider_config=config["provider"],
        provider=cloud,
        auth_config=config["auth"],
        cluster_name=config["cluster_name"],
        file_mounts=files,
        initialization_commands=init,
        setup_commands=set_up,
        ray_start_commands=commands,
        runtime_hash=runtime_hash,
        file_mounts_contents_hash=contents_hash,
        is_head_node=False,
        cluster_synced_files=synced,
        rsync_options={
            "rsync_exclude": config.get("rsync_exclude"),
            "rsync_filter": config.get("rsync_filter"),
        },
        process_runner=process_runner,
        use_internal_ip=True,
        docker_config=config.get("docker"),
    )
    updater.run()
    if updater.update_time is None:  # Ray swallows the failure of a command
        raise RuntimeError(f"{cloud_id}: a set-up or start command failed; its output is in the log above")


def ray_train() -> Any:
    """What Ray Train's `fit` is made of, by name, to be derived from and put in place of itself."""
    from types import SimpleNamespace

    from ray.train.v2._internal.execution.controller.controller import TrainController
    from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
    from ray.train.v2.api import data_parallel_trainer

    return SimpleNamespace(
        NoopDecision=NoopDecision,
        PlacementGroupHandle=PlacementGroupHandle,
        ResizeDecision=ResizeDecision,
        ScalingPolicy=ScalingPolicy,
        TrainController=TrainController,
        WorkerGroup=WorkerGroup,
        trainers=data_parallel_trainer,
    )
