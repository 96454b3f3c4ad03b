"""The commands `up`, `down`, `head`, `status`, `schema`, `doctor` and `demo`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_list, as_result, as_table
from raytide.core.clock import ago
from raytide.core.errors import UsageError
from raytide.core.money import format_usd

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Accept a Ray that runs any code for anyone on the network.")
]
Monitoring = Annotated[
    bool, typer.Option("--monitoring", help="Run Prometheus and Alertmanager beside the cluster, if installed.")
]
Name = Annotated[str, typer.Option("--name", "--cluster", help="The cluster's name, if this machine has several.")]
SchemaOf = Literal["cluster", "train", "data", "serve", "flow", "compress", "eval"]


def up(
    config: Annotated[Path | None, typer.Argument(help="A cluster.yaml; the default is a small CPU fleet.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Run the nodes as real raylets on this machine.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the steps in the cloud without executing them.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", "--cluster", help="The default is `local`, or the file's cluster_name.")
    ] = None,
    owner: Annotated[
        int | None, typer.Option("--owner", metavar="PID", help="With --local: end the cluster when this process ends.")
    ] = None,
    insecure: Insecure = False,
    monitoring: Monitoring = False,
    json: Json = False,
) -> None:
    """Start a cluster: a Ray head, raytide's controller and its API.

    With --local the cluster runs on this machine. Otherwise Ray's cluster launcher starts it in the cloud that the file
    names.
    """
    if local and not dry_run:
        _up_here(config, name or "local", owner, monitoring=monitoring, json=json)
    elif monitoring:
        raise UsageError(
            "in a cloud, --monitoring belongs to the head's command.",
            hint="Write `raytide head ~/ray_bootstrap_config.yaml --monitoring` in head_start_ray_commands.",
        )
    elif config is None or local:
        asked = f"raytide up {config or 'cluster.yaml'} --dry-run" if dry_run else "raytide up --local"
        raise UsageError("a cluster in a cloud needs a cluster.yaml and no --local.", hint=f"Run `{asked}`.")
    elif dry_run:
        _show_steps(config, name, insecure=insecure, json=json)
    else:
        _up_there(config, name, insecure=insecure, json=json)


def _up_here(config: Path | None, name: str, owner_pid: int | None, *, monitoring: bool, json: bool) -> None:
    from raytide.control.bootstrap.local import up as start
    from raytide.core.io.process import Process

    owner = None if owner_pid is None else Process.of(owner_pid)
    if owner_pid is not None and owner is None:
        raise UsageError(
            f"there is no process {owner_pid}.", hint="Give the id of a running process: `--owner $$` is this shell."
        )
    if not json:
        print(f"starting cluster {name} ...", file=sys.stderr)
    started = start(config, name=name, owner=owner, monitoring=monitoring and _has_monitoring())
    _warn_of_rights(started.config_path)
    if json:
        as_json({"name": name, "run_dir": str(started.run_dir), "api": started.api_url, "ray": started.dashboard_url})
        return
    print(f"cluster {name} is up: API {started.api_url}, Ray {started.dashboard_url}")
    if started.monitoring:
        print(f"Prometheus {started.prometheus_url}, Alertmanager {started.alertmanager_url}")
    which = ("", "") if name == "local" else (f" --cluster {name}", f" --name {name}")
    print(f"`raytide status{which[0]}` or `raytide page{which[0]}` shows it, `raytide down{which[1]}` ends it")
    print(f'`eval "$(raytide status --ray{which[0]})"` lets Ray\'s own commands find it: ray status, ray job submit')


def _has_monitoring() -> bool:
    """Returns whether Prometheus and Alertmanager are installed; if not, says how to install them."""
    from raytide.dashboards.prometheus.programs import HOW_TO_INSTALL, find_program

    missing = [name for name in ("prometheus", "alertmanager") if find_program(name) is None]
    if missing:
        print(f"warning: no monitoring: {' and '.join(missing)} not installed. {HOW_TO_INSTALL}", file=sys.stderr)
    return not missing


def _warn_of_rights(config_path: Path) -> None:
    from raytide.core.objects.cluster_config import load_cluster

    settings = load_cluster(config_path).settings
    if len(settings.teams) > 1 and not settings.data_roots:
        text = "warning: trainings, builds and endpoints of every team may read any data that raytide's user can read:"
        print(f"{text} set metadata.raytide.data_roots (docs/security.md)", file=sys.stderr)
    if os.geteuid() == 0 and not settings.users():
        text = "warning: scripts run as root, as raytide does, and can read every token: name another user in"
        print(f"{text} metadata.raytide.run_as (docs/security.md)", file=sys.stderr)


def _show_steps(config: Path, name: str | None, *, insecure: bool, json: bool) -> None:
    from raytide.control.bootstrap import cloud_launch

    steps = cloud_launch.dry_run(config, name, insecure=insecure)
    if json:
        as_json(steps)
        return
    for step in steps:
        print(f"{step.machine}: {step.what} {step.text}")


def _up_there(config: Path, name: str | None, *, insecure: bool, json: bool) -> None:
    """Starts a cloud cluster. With --json, the output of Ray's launcher and of its commands goes to stderr."""
    from raytide.control.bootstrap import cloud_launch

    with _stdout_to_stderr() if json else nullcontext():
        head = cloud_launch.up(config, name, insecure=insecure)
    if json:
        as_json({"name": head.name, "head": head.ip})
        return
    print(f"cluster {head.name} is up; its head is {head.ip}. To inspect it and to end it:")
    print(f"  ray exec {config} 'raytide status --cluster {head.name}'")
    print(f"  ray exec {config} 'raytide down --name {head.name}' && ray down {config}")


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)


def head(
    config: Annotated[Path, typer.Argument(help="The cluster.yaml that `ray up` writes: ~/ray_bootstrap_config.yaml.")],
    block: Annotated[bool, typer.Option("--block", help="Wait until the cluster ends; for containers.")] = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="One of several heads: lead, or wait until the one that leads is lost.")
    ] = False,
    as_name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="With --standby: this machine; by default its host name.")
    ] = None,
    insecure: Insecure = False,
    monitoring: Monitoring = False,
) -> None:
    """Start controller and API beside the Ray head of this machine.

    This command is the last of cluster.yaml's head_start_ray_commands. If controller and API already run, the
    command restarts them with the present content of CONFIG. With --standby, the command starts a guard process.
    Once this machine leads the cluster, the guard starts Ray's head, the controller and the API.
    """
    from raytide.control.bootstrap.head import cloud_head

    if standby:
        _join_heads(config, as_name, block=block, insecure=insecure, monitoring=monitoring)
        return
    if as_name is not None:
        raise UsageError("--as names one of several heads.", hint="Add --standby, or leave --as out.")
    started = cloud_head.start(config, insecure=insecure, monitoring=monitoring and _has_monitoring())
    _warn_of_rights(started.config_path)
    print(f"cluster {started.name} is up: API {started.api_url}, Ray {started.dashboard_url}")
    if block:
        cloud_head.run_foreground(started)


def _join_heads(config: Path, name: str | None, *, block: bool, insecure: bool, monitoring: bool) -> None:
    import socket

    from raytide.control.bootstrap.head.guard import run_guard, start_guard

    name = name or socket.gethostname()
    monitoring = monitoring and _has_monitoring()
    if block:
        run_guard(config, name, insecure=insecure, monitoring=monitoring)
        return
    joined = start_guard(config, name, insecure=insecure, monitoring=monitoring)
    _warn_of_rights(joined.config_path)
    print(f"{name} is a head of cluster {joined.name}: it leads, or waits until the head that leads is lost")
    print(f"`raytide status --cluster {joined.name}` tells which; its log is {joined.log('guard')}")


def watch_notices(cloud: Annotated[str, typer.Argument(help="aws, gcp or azure.")]) -> None:
    """Start the process that watches this node for interruption notices of its cloud. raytide runs this command itself
    on every node that it buys.
    """
    from raytide.control.bootstrap.node_agent import watch_notices as start

    print(f"notices of {cloud} are watched by process {start(cloud).pid}")


def export_metrics() -> None:
    """Start this node's exporter of GPU and energy metrics. raytide runs this itself on every GPU node that it buys."""
    from raytide.control.bootstrap.node_agent import export_metrics as start

    print(f"the metrics of this node are exported by process {start().pid}")


def down(name: Name = "local", json: Json = False) -> None:
    """End a cluster and check that no process of it is left.

    On a cloud's head, the command ends every node that raytide bought. Then use `ray down` to end the head.
    """
    from raytide.control.bootstrap import local
    from raytide.control.bootstrap.cluster_record import HeadCluster, load, run_dir_of
    from raytide.control.bootstrap.head import cloud_head
    from raytide.control.bootstrap.head.ending import end_guard

    cluster = load(run_dir_of(name))
    if cluster is None and end_guard(run_dir_of(name)):
        text = f"this machine waits no more to be the head of cluster {name}; the cluster goes on"
        as_result({"name": name, "state": "standby ended", "differences": []}, text, json)
        return
    closed = cloud_head.down(cluster) if isinstance(cluster, HeadCluster) else local.down(name)
    wrong = [] if closed is None else [asdict(difference) for difference in closed.differences]
    if json:
        as_json({"name": name, "state": "down" if closed else "absent", "differences": wrong})
    elif closed is None:
        print(f"there is no cluster {name}; nothing was done")
    else:
        print(f"cluster {name} is down")
        for d in closed.differences:
            amounts = f"booked {d.booked_micro_usd} micro-dollars, billed {d.bill_micro_usd}"
            print(f"warning: the books do not balance: {d.node_id}: {amounts}: {d.what}")


def status(
    cluster: ClusterName = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help='For `eval "$(raytide status --ray)"`, so that Ray\'s own commands find the cluster.'
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show the nodes, jobs and cost of the cluster."""
    from raytide.control.client import ApiClient

    now = ApiClient.find(cluster).status()
    if ray:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in now.ray_environment.items()))
        return
    if json:
        as_json(now)
        return
    age = "never ticked" if now.controller_age_s is None else f"decided {ago(now.controller_age_s)} ago"
    counts = ", ".join(f"{count} {state}" for state, count in now.jobs.items()) or "none"
    print(f"cluster {now.name}: controller {age}; jobs: {counts}; endpoints: {now.endpoints}")
    if now.head:
        waiting = f"{', '.join(now.standbys)} waits to take over" if now.standbys else "no machine waits to take over"
        print(f"head: {now.head}; {waiting}")
    print(f"{format_usd(now.price_micro_usd_h)} an hour now, {format_usd(now.cost_micro_usd)} so far")
    rows = [
        (node.id, node.type, node.market, node.zone, node.state, format_usd(node.price_micro_usd_h) + "/h", node.reason)
        for node in now.nodes
    ]
    as_table(("NODE", "TYPE", "MARKET", "ZONE", "STATE", "PRICE", "REASON"), rows)
    if now.prometheus:
        print(f"Prometheus {now.prometheus}, Alertmanager {now.alertmanager}")
    for error in now.errors:
        print(f"warning: {error}")


def schema(
    what: Annotated[SchemaOf, typer.Argument(help="The kind of file.")] = "cluster",
) -> None:
    """Print the JSON schema of a spec, or of cluster.yaml's settings.

    Editors use the schema to complete and check these files.
    """
    from raytide.actors.quality.suite import QualitySuite
    from raytide.core.config import Config
    from raytide.core.objects.cluster_config import RaytideSection
    from raytide.core.objects.endpoint import ServeSpec
    from raytide.core.specs.data import DataSpec
    from raytide.core.specs.train import TrainSpec
    from raytide.pipelines.compress.recipe import CompressRecipe
    from raytide.workflows.spec import FlowSpec

    specs: dict[SchemaOf, type[Config]] = {
        "cluster": RaytideSection,
        "train": TrainSpec,
        "data": DataSpec,
        "serve": ServeSpec,
        "flow": FlowSpec,
        "compress": CompressRecipe,
        "eval": QualitySuite,
    }
    as_json(specs[what].model_json_schema())


def doctor(
    host: Annotated[
        str | None, typer.Argument(metavar="[HOST]", help="An own machine of cluster.yaml; by default this machine.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="The file that names HOST; by default the cluster's own.")
    ] = None,
    name: Name = "local",
    json: Json = False,
) -> None:
    """Check this machine, or one of your own machines over ssh, for problems, and show how to fix them."""
    from raytide.control.doctor.host import check_host
    from raytide.control.doctor.machine import check

    if host is None and config is not None:
        raise UsageError("--config needs a machine.", hint="Name it: `raytide doctor HOST --config FILE`.")
    findings = check() if host is None else check_host(host, config, name)
    rows = [{"name": f.name, "status": f.status, "detail": f.detail, "mend": f.fix} for f in findings]
    as_list(rows, ("CHECK", "STATUS", "DETAIL", "MEND"), lambda row: tuple(row.values()), json)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep the cluster running and print a curl command.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the dataset and the model; temporary by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Run the whole life of a model on this machine.

    It builds a dataset, trains on spot nodes that are reclaimed, serves the model under load, and shows what that cost.
    """
    from raytide.cli.demo import run

    for number in (signal.SIGTERM, signal.SIGHUP):  # as on Ctrl-C, the cluster is ended first
        signal.signal(number, _leave)
    raise typer.Exit(run(keep=keep, out=out, json=json))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
