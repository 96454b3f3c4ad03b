"""Implements `raytide up cluster.yaml`: Ray's cluster launcher starts the head, which runs raytide's controller.

A dry run uses Ray's launcher and updater, too. The provider of a dry run does not create machines, but records every
step.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.autoscaler.command_runner import CommandRunnerInterface
from ray.autoscaler.node_provider import NodeProvider

from raytide.autoscaler.providers.cloud.setup import RAY_TOKEN, start_commands
from raytide.autoscaler.providers.hosts.ssh import agent_command
from raytide.autoscaler.providers.slurm.provider import job_arguments, job_script
from raytide.control.bootstrap.exposure import check_file, uses_token
from raytide.core import ray_internals
from raytide.core.config import load_yaml
from raytide.core.errors import ClusterError, ConfigError, ProviderError, UsageError
from raytide.core.objects.cluster_config import ClusterConfig, load_cluster
from raytide.core.objects.hardware.clouds import cloud_files
from raytide.core.objects.hardware.host import Host, HostsSection
from raytide.core.objects.hardware.provider_section import provider_section
from raytide.core.objects.node import NodeType

_HEAD_IP, _NODE_ID = "HEAD_IP", "node-1"


@dataclass(frozen=True, slots=True)
class LaunchedHead:
    name: str
    ip: str


@dataclass(frozen=True, slots=True)
class SetUpStep:
    """One step of a machine's set-up."""

    machine: str
    """The node type, or the name of an own machine."""
    what: str
    """`buy`, `copy` or `run`; `switch on` and `switch off` an own machine; `submit` a Slurm job."""
    text: str


def up(path: Path, name: str | None = None, *, insecure: bool = False) -> LaunchedHead:
    """Starts the head on a cloud, or updates a running head.

    Checks the file first. Raises an error, before anything is done, if the file is unusable, or if the file would
    open Ray to other machines. `insecure` skips the second check.
    """
    file, _ = _checked(path, name, insecure)
    from ray.autoscaler import sdk

    try:
        completed = sdk.create_or_update_cluster(file, no_config_cache=True)
        ip = sdk.get_head_node_ip(file)
    except Exception as error:  # each cloud's library and Ray's launcher have exceptions of their own
        raise ProviderError(
            f"`ray up` of {path} failed: {error}", hint="Correct that and repeat: machines that exist are reused."
        ) from error
    return LaunchedHead(str(completed["cluster_name"]), str(ip))


def dry_run(path: Path, name: str | None = None, *, insecure: bool = False) -> list[SetUpStep]:
    """Returns the steps that would set up the head and one node of each type, but performs none of them. In a real
    start, `up` performs the head's steps, and the controller performs the nodes' steps.
    """
    config = load_cluster(path)
    hosts = config.settings.hosts
    own = [step for host in hosts.machines for step in _host_steps(hosts, host)] if hosts is not None else []
    own += _slurm_steps(config)
    own += [step for each in _further_files(config, load_yaml(path)) for step in _bought_steps(each, config, "worker")]
    if provider_section(load_yaml(path), where=str(path))["type"] in ("hosts", "slurm"):
        return own
    file, config = _checked(path, name, insecure)
    os.environ.setdefault("RAY_USAGE_STATS_PROMPT_ENABLED", "0")  # Ray would wait for an answer to its prompt
    prepared = ray_internals.prepared_config(file)
    head = _RecordingCloud(prepared, str(prepared["head_node_type"]))
    steps = _recorded(head, lambda: ray_internals.set_up_head(head, prepared))
    for name in config.settings.owned_node_types():
        prepared["available_node_types"].pop(name, None)
    return steps + _bought_steps(prepared, config, "head") + own


def _bought_steps(prepared: Mapping[str, Any], config: ClusterConfig, role: str) -> list[SetUpStep]:
    """Returns the set-up steps of one node of each type in Ray's configuration `prepared`. The commands of `role` tell
    whether Ray uses a token."""
    sold = [each for each in config.node_types if each.name in prepared["available_node_types"]]
    return [step for node_type in sold for step in _worker_steps(prepared, node_type, uses_token(prepared, role))]


def _further_files(config: ClusterConfig, file: Mapping[str, object]) -> list[dict[str, Any]]:
    """Returns Ray's configurations of the further clouds in the file, with Ray's defaults; fake ones are left out."""
    files = cloud_files(file, config.settings.providers).values()
    return [ray_internals.prepared_config(each) for each in files if each["provider"]["type"] != "fake"]


def _checked(path: Path, name: str | None, insecure: bool) -> tuple[dict[str, Any], ClusterConfig]:
    config, file = load_cluster(path), load_yaml(path)
    section = provider_section(file, where=str(path))
    if section["type"] in ("local", "fake"):
        raise UsageError(
            f"provider {section['type']} is for this machine alone.", hint=f"Use `raytide up {path} --local`."
        )
    if section["type"] in ("hosts", "slurm"):
        raise UsageError(
            f"{path} has no cloud in which a head could be started.",
            hint="Run `ray start --head --no-monitor` and `raytide head FILE` on the machine that is to be the head.",
        )
    if section["type"] == "kuberay":
        raise UsageError(
            f"{path} is for a RayCluster, which Kubernetes starts.",
            hint="Apply the manifest of docs/providers.md; its head pod runs `raytide head`.",
        )
    _check_head(file, path)
    if not insecure:
        check_file(file, where=str(path))
        for cloud, cloud_file in cloud_files(file, config.settings.providers).items():
            check_file(cloud_file, where=f"{path}: metadata.raytide.providers.{cloud}")
    for target, source in dict(file.get("file_mounts") or {}).items():  # type: ignore[call-overload]
        if not Path(source).expanduser().exists():
            raise ConfigError(
                f"{path}: file_mounts.{target}: {source} does not exist.",
                hint="Paths are relative to the current folder. `pip wheel --no-deps -w dist .` makes raytide's wheel.",
            )
    return (file | {"cluster_name": name} if name else file), config


def _check_head(file: Mapping[str, Any], path: Path) -> None:
    """Raises a ConfigError if the head's commands would start Ray's own autoscaler, or would not start raytide."""
    start = "\n".join(file.get("head_start_ray_commands") or ())
    if "--no-monitor" not in start or "--autoscaling-config" in start:
        raise ConfigError(
            f"{path}: head_start_ray_commands would start Ray's own autoscaler beside raytide's.",
            hint="Use `ray start --head --no-monitor` there, without --autoscaling-config.",
        )
    if "raytide head" not in start:
        raise ConfigError(
            f"{path}: head_start_ray_commands does not start raytide.",
            hint="Add `raytide head ~/ray_bootstrap_config.yaml` after `ray start`.",
        )


def _host_steps(hosts: HostsSection, host: Host) -> list[SetUpStep]:
    """Returns the set-up steps of a node on an own machine, which has raytide already."""
    who = f"ssh -p {host.port or hosts.ssh.port} {host.user or hosts.ssh.user}@{host.address}"
    power = (("switch on", hosts.power_on_of(host)), ("switch off", hosts.power_off_of(host)))
    on, off = ([SetUpStep(host.name, what, shlex.join(argv))] if argv else [] for what, argv in power)
    return [*on, SetUpStep(host.name, "run", f"{who} {shlex.quote(agent_command(hosts))}"), *off]


def _slurm_steps(config: ClusterConfig) -> list[SetUpStep]:
    """Returns the submission of a node of each of Slurm's types, and the script of its job."""
    section = config.settings.slurm
    if section is None:
        return []
    steps = []
    for node_type in config.node_types:
        if node_type.name in section.node_types:
            arguments = job_arguments(section, node_type, f"raytide:CLUSTER:{_NODE_ID}", f"FOLDER/{_NODE_ID}.log")
            steps.append(SetUpStep(node_type.name, "submit", shlex.join(["sbatch", "--parsable", *arguments])))
            steps.append(
                SetUpStep(node_type.name, "run", job_script(section, f"FOLDER/{_NODE_ID}.json").splitlines()[-1])
            )
    return steps


def _worker_steps(config: Mapping[str, Any], node_type: NodeType, has_token: bool) -> list[SetUpStep]:
    cloud = _RecordingCloud(config, node_type.name)
    cloud.create_node(config["available_node_types"][node_type.name]["node_config"], {}, 1)
    commands = start_commands(config, _HEAD_IP, _NODE_ID, node_type, node_type.zones[0], has_token=has_token)
    if has_token:  # only the head has the file
        cloud.note("copy", f"{RAY_TOKEN} to {RAY_TOKEN}")
    return _recorded(
        cloud, lambda: ray_internals.set_up_worker(cloud, config, _NODE_ID, node_type.name, commands, None)
    )


def _recorded(cloud: _RecordingCloud, act: Any) -> list[SetUpStep]:
    """Runs `act` and returns its steps; what Ray prints is shown only in an error."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            act()
    except Exception as error:  # Ray's launcher raises any exception of its steps
        raise ClusterError(
            f"Ray's launcher failed: {error}\n{printed.getvalue().strip()[-2000:]}", hint="Correct the file."
        ) from error
    return cloud.steps


class _RecordingCloud(NodeProvider):
    """A provider with one machine, which is up as soon as it is created."""

    def __init__(self, config: Mapping[str, Any], node_type: str) -> None:
        super().__init__({}, str(config["cluster_name"]))
        self.steps: list[SetUpStep] = []
        self._node_type = node_type
        self._tags: dict[str, dict[str, str]] = {}

    def note(self, what: str, text: str) -> None:
        self.steps.append(SetUpStep(self._node_type, what, text))

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        return list(self._tags)

    def is_running(self, node_id: str) -> bool:
        return True

    def is_terminated(self, node_id: str) -> bool:
        return False

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._tags[node_id]

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        self._tags[node_id] |= tags

    def external_ip(self, node_id: str) -> str:
        return _HEAD_IP

    internal_ip = external_ip

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        self.note("buy", json.dumps(node_config, sort_keys=True))
        self._tags[_NODE_ID] = dict(tags)

    def get_command_runner(self, *args: Any, **kwargs: Any) -> CommandRunnerInterface:
        return _RecordingRunner(self)


class _RecordingRunner(CommandRunnerInterface):
    def __init__(self, cloud: _RecordingCloud) -> None:
        self._cloud = cloud

    def run(
        self, cmd: str | None = None, *_: Any, environment_variables: dict[str, object] | None = None, **__: Any
    ) -> str:
        self._cloud.note("run", ray_internals.with_environment(cmd or "", environment_variables or {}))
        return ""

    def run_rsync_up(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        """Records a copy. The file that Ray generates is noted as `this file`, because its name differs each time."""
        self._cloud.note("copy", f"{'this file' if 'ray-bootstrap-' in source else source} to {target}")

    def run_init(self, *, as_head: bool, file_mounts: dict[str, str], sync_run_yet: bool) -> bool | None:
        return None
