"""up, down, status, schema, doctor."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_table
from raytide.core.clock import ago
from raytide.core.errors import UsageError
from raytide.core.money import format_usd

Name = Annotated[str, typer.Option("--name", "--cluster", help="Several clusters on one machine have different names.")]
SchemaOf = Literal["cluster", "train", "data", "serve"]


def up(
    config: Annotated[Path | None, typer.Argument(help="A cluster.yaml; a small CPU fleet when left out.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Nodes are real raylets on this machine.")] = False,
    name: Name = "local",
    json: Json = False,
) -> None:
    """Start a cluster: a Ray head, raytide's controller and its API."""
    from raytide.control import cluster

    if not local:
        asked = "raytide up --local" if config is None else f"raytide up {config} --local"
        raise UsageError("only clusters on this machine can be started yet.", hint=f"Say `{asked}`.")
    if not json:
        print(f"starting cluster {name} ...", file=sys.stderr)
    started = cluster.up(config, name=name)
    if json:
        as_json({"name": name, "run_dir": str(started.run_dir), "api": started.api_url, "ray": started.dashboard_url})
        return
    print(f"cluster {name} is up: API {started.api_url}, Ray {started.dashboard_url}")
    which = ("", "") if name == "local" else (f" --cluster {name}", f" --name {name}")
    print(f"`raytide status{which[0]}` shows it, `raytide down{which[1]}` ends it")
    print(f'`eval "$(raytide status --ray{which[0]})"` lets Ray\'s own commands in: ray status, ray job submit')


def down(name: Name = "local", json: Json = False) -> None:
    """End a cluster and check that no process of it is left."""
    from raytide.control import cluster

    closed = cluster.down(name)
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
        bool, typer.Option("--ray", help='For `eval "$(raytide status --ray)"`: Ray\'s own commands find the cluster.')
    ] = False,
    json: Json = False,
) -> None:
    """Nodes, jobs and dollars of the cluster."""
    from raytide.control.client import Client
    from raytide.control.wire import to_json

    now = Client.find(cluster).status()
    if ray:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in now.ray_environment.items()))
        return
    if json:
        as_json(to_json(now))
        return
    age = "never ticked" if now.controller_age_s is None else f"decided {ago(now.controller_age_s)} ago"
    counts = ", ".join(f"{count} {state}" for state, count in now.jobs.items()) or "none"
    print(f"cluster {now.name}: controller {age}; jobs: {counts}; endpoints: {now.endpoints}")
    print(f"{format_usd(now.price_micro_usd_h)} an hour now, {format_usd(now.cost_micro_usd)} so far")
    rows = [
        (node.id, node.type, node.market, node.zone, node.state, format_usd(node.price_micro_usd_h) + "/h", node.reason)
        for node in now.nodes
    ]
    as_table(("NODE", "TYPE", "MARKET", "ZONE", "STATE", "PRICE", "REASON"), rows)
    for error in now.errors:
        print(f"warning: {error}")


def schema(
    what: Annotated[SchemaOf, typer.Argument(help="Which file it is for.")] = "cluster",
) -> None:
    """Print the JSON schema of a spec, or of cluster.yaml's settings.

    Editors complete and check with it.
    """
    from raytide.core.cluster import RaytideSection
    from raytide.core.config import Config
    from raytide.core.data_spec import DataSpec
    from raytide.core.endpoint import ServeSpec
    from raytide.core.train_spec import TrainSpec

    specs: dict[SchemaOf, type[Config]] = {
        "cluster": RaytideSection,
        "train": TrainSpec,
        "data": DataSpec,
        "serve": ServeSpec,
    }
    as_json(specs[what].model_json_schema())


def doctor(json: Json = False) -> None:
    """Check what this machine lacks, and say how to mend it."""
    from raytide.control.doctor import check

    findings = check()
    if json:
        as_json([{"name": f.name, "status": f.status, "detail": f.detail, "mend": f.mend} for f in findings])
    else:
        as_table(("CHECK", "STATUS", "DETAIL", "MEND"), [(f.name, f.status, f.detail, f.mend) for f in findings])
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)
