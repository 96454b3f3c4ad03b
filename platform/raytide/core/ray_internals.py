"""All uses of Ray's private APIs, checked against ray 2.60. Review this file for a new version of Ray.

Ray is imported lazily. One other file imports a private API: ray_serve/policy.py. Serve pickles that file by value and
runs it in Serve's controller, where raytide may not be installed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

GcsClient = Any
"""The type of `ray._raylet.GcsClient`, which is compiled and has no type hints."""


def gcs_client(address: str, *, timeout_s: float = 5.0) -> GcsClient:
    """Returns a GCS client that needs no driver connection. Raises OSError at once if no process listens at `address`,
    because Ray would block for 40 s.
    """
    from ray import _raylet

    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s):
        return _raylet.GcsClient(address=address)  # type: ignore[attr-defined]


def gcs_address_here() -> str:
    """Returns the GCS address of this machine's cluster: RAY_ADDRESS, else the address that `ray start` recorded.
    Returns an empty string if RAY_ADDRESS is not set and no address is recorded.
    """
    from ray._private.services import canonicalize_bootstrap_address, find_bootstrap_address

    address = os.environ.get("RAY_ADDRESS") or find_bootstrap_address(None)
    return (canonicalize_bootstrap_address(address) or "") if address else ""


def dashboard_url(client: GcsClient) -> str:
    """Returns the URL of Ray's dashboard and job service. Returns an empty text until the dashboard has started."""
    from ray._private import ray_constants

    key, namespace = ray_constants.DASHBOARD_ADDRESS.encode(), ray_constants.KV_NAMESPACE_DASHBOARD
    address = client.internal_kv_get(key, namespace, 5.0)
    return f"http://{address.decode()}" if address else ""


def connected_gcs() -> GcsClient:
    """Returns this process's GCS client, which exists after `ray.init`."""
    from ray._private.worker import global_worker

    worker: Any = global_worker
    worker.check_connected()
    return worker.gcs_client


def agent_address() -> str:
    """Returns `host:port` of the HTTP server of this node's agent. Returns an empty text until the agent has
    started.
    """
    import ray
    from ray._private import ray_constants
    from ray.dashboard.consts import DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX

    key = f"{DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX}{ray.get_runtime_context().get_node_id()}".encode()
    found = connected_gcs().internal_kv_get(key, ray_constants.KV_NAMESPACE_DASHBOARD, 5.0)
    if not found:
        return ""
    host, port, _ = json.loads(found)
    return f"{host}:{port}"


def output_files() -> tuple[str, ...]:
    """Returns the names of the files in Ray's log folder that receive this worker's standard output and standard
    error."""
    from ray._private.worker import global_worker

    worker: Any = global_worker
    return tuple(os.path.basename(path) for path in (worker.get_out_file_path(), worker.get_err_file_path()) if path)


def is_without_ray() -> bool:
    """Returns whether the first use of Ray in this process would start a new local cluster."""
    import ray

    return not ray.is_initialized() and "RAY_ADDRESS" not in os.environ


def hush_node_deaths() -> None:
    """Stops this process from printing what Ray publishes to its drivers, such as the last lines of dead raylets. Ray
    prints them even with `log_to_driver=False`.

    raytide's drivers learn of lost nodes from their leases, and their output belongs to the user.
    """
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None


def use_ray_at(environment: Mapping[str, str]) -> None:
    """Makes this process connect to the Ray cluster that these environment variables describe. Ray reads its token
    settings only at import, so this function makes Ray read them a second time.
    """
    from ray import _raylet

    os.environ.update(environment)
    _raylet.Config.initialize("")  # type: ignore[attr-defined]


def autoscaler_messages() -> Any:
    """Returns Ray's generated protobuf module, which has no type annotations."""
    from ray.core.generated import autoscaler_pb2

    return autoscaler_pb2


def label_in_operator() -> int:
    from ray.core.generated import common_pb2

    return int(common_pb2.LabelSelectorOperator.LABEL_OPERATOR_IN)  # type: ignore[attr-defined]


def combine_bundles(requests: Iterable[Any]) -> list[Any]:
    """Returns the resource requests of a placement group's bundles. The requests that must share a node (STRICT_PACK)
    are combined into one."""
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    return list(ResourceRequestUtil.combine_requests_with_affinity(list(requests)))


def strict_pack() -> int:
    from ray.core.generated import common_pb2

    return int(common_pb2.PlacementStrategy.STRICT_PACK)  # type: ignore[attr-defined]


def serve_controller() -> Any:
    """Returns the handle of Serve's controller. Raises ValueError if Serve is not running."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def kill_serve_actor(actor_name: str) -> bool:
    """Kills the actor of a Serve replica. Returns whether the actor existed."""
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE

    try:
        ray.kill(ray.get_actor(actor_name, namespace=SERVE_NAMESPACE))
    except ValueError:
        return False
    return True


def replica_node(actor_name: str) -> str:
    """Returns Ray's id of the node on which a Serve replica starts. Ray knows this node before Serve reports the node.
    Returns an empty string if the replica has no node yet.
    """
    import ray
    from ray._private import state
    from ray.serve._private.constants import SERVE_NAMESPACE

    try:
        actor: Any = ray.get_actor(actor_name, namespace=SERVE_NAMESPACE)
    except ValueError:
        return ""
    known = state.actors(actor._actor_id.hex()) or {}
    return str(known["Address"]["NodeID"]) if known.get("Pid") else ""  # without a pid, the node is only a candidate


class GroupRecord(NamedTuple):
    """Ray's record of a placement group."""

    name: str
    id: str
    """The group's id, in hex."""
    state: str
    """Ray's name of the state, such as CREATED or REMOVED."""
    nodes: tuple[str, ...]
    """Ray's ids of the nodes that hold the group's bundles."""


def group_records() -> list[GroupRecord]:
    """Returns the records of all placement groups since Ray's start. Ray never forgets a removed group, so the list
    only grows. Ray's own function takes several times as long for each.
    """
    from ray._private import state

    return [_group_record(body) for body in state.state._connect_and_get_accessor().get_placement_group_table()]


def group_record(id: str) -> GroupRecord | None:
    """Returns the record of one placement group, which may be removed. Returns None if Ray does not know it."""
    from ray import PlacementGroupID
    from ray._private import state

    wanted = PlacementGroupID(bytes.fromhex(id))
    body = state.state._connect_and_get_accessor().get_placement_group_info(wanted)
    return None if body is None else _group_record(body)


def _group_record(body: bytes) -> GroupRecord:
    from ray.core.generated import gcs_pb2

    table: Any = gcs_pb2.PlacementGroupTableData  # type: ignore[attr-defined]
    data = table.FromString(body)
    nodes = tuple(bundle.node_id.hex() for bundle in data.bundles if bundle.node_id)
    return GroupRecord(data.name, data.placement_group_id.hex(), table.PlacementGroupState.Name(data.state), nodes)


_NODE_PORTS = (
    "node_manager_port",
    "runtime_env_agent_port",
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
)
"""The ports that Ray reads from a node that joined."""


def start_raylet(parameters: Mapping[str, Any]) -> int:
    """Starts a node's raylet with these RayParams and returns its pid at once. The raylet joins the cluster seconds
    later.

    This replaces `ray start`, which has three problems. Two calls within one second choose the same socket name, and
    one raylet dies. Ray ends a node that has not joined after 30 s, but on a busy machine a node may need longer.
    Ray does not pass on the port of the dashboard agent, so the raylet waits for the agent to report it, and aborts
    after 15 s.
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
    """Returns cluster.yaml with Ray's defaults filled in, without calling the cloud."""
    from ray.autoscaler._private.util import prepare_config

    prepared: dict[str, Any] = prepare_config(dict(file))
    return prepared


def set_up_head(cloud: Any, config: Mapping[str, Any]) -> None:
    """Sets up the head as `ray up` does, on the machines of the NodeProvider `cloud`."""
    from ray.autoscaler._private.commands import get_or_create_head_node

    get_or_create_head_node(dict(config), "cluster.yaml", False, False, True, None, _provider=cloud)


def with_environment(command: str, variables: Mapping[str, Any]) -> str:
    """Returns the shell command with these environment variables set. The result has the form in which Ray's updater
    sends commands.
    """
    from ray.autoscaler._private.command_runner import _with_environment_variables

    return str(_with_environment_variables(command, dict(variables)))


def node_provider(section: Mapping[str, Any], cluster_name: str) -> Any:
    """Returns a new NodeProvider for a `provider` section. Ray's cache is bypassed, because it holds only one
    NodeProvider for each type."""
    from ray.autoscaler._private.providers import _get_node_provider

    return _get_node_provider(dict(section), cluster_name, use_cache=False)


def bootstrapped_config(file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns cluster.yaml, completed by Ray's bootstrap for the provider that the file names. The bootstrap may create
    keys, security groups and the like in the cloud.
    """
    from ray.autoscaler._private.providers import _get_node_provider_cls

    config = prepared_config(file)
    completed: dict[str, Any] = _get_node_provider_cls(config["provider"]).bootstrap_config(config)
    return completed


def worker_tags(config: Mapping[str, Any], node_type: str) -> dict[str, str]:
    """Returns the tags that Ray's autoscaler gives to a new worker. `ray down` and `ray exec` find the worker by these
    tags."""
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


def is_new(tags: Mapping[str, str]) -> bool:
    """Returns whether a machine's set-up has not begun."""
    return tags.get(_STATUS_TAG) == "uninitialized"


def set_up_worker(
    cloud: Any, config: Mapping[str, Any], cloud_id: str, node_type: str, commands: list[str], process_runner: Any
) -> None:
    """Sets up a worker over ssh: copies files and runs the initialization, set-up and start commands. Raises an error
    if a command fails."""
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
    if updater.update_time is None:  # Ray does not raise when a command fails
        raise RuntimeError(f"{cloud_id}: a set-up or start command failed; its output is in the log above")


def ray_train() -> Any:
    """Returns a namespace with the classes and modules of Ray Train that `fit` uses internally and that raytide extends
    or replaces.
    """
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
