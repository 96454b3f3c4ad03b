"""serve: start, list and end endpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_table
from raytide.control.client import Client
from raytide.control.wire import to_json
from raytide.core.config import load_yaml
from raytide.core.endpoint import ServeSpec
from raytide.core.errors import UsageError
from raytide.core.money import format_usd
from raytide.endpoint import EndpointHandle
from raytide.tide import Tide


def serve(
    model: Annotated[
        str | None, typer.Argument(help="A Hugging Face directory, or a ServeSpec in a YAML file.")
    ] = None,
    name: Annotated[str, typer.Option(help="The endpoint's, and so the model's, name.")] = "",
    replicas: Annotated[str, typer.Option(help="`2`, or `1:4` for as many as the load needs.")] = "1",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Stay until a replica answers.")] = True,
    delete: Annotated[str, typer.Option(help="End the endpoint of this name.")] = "",
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Serve a model, or list what is served.

    The address that it prints takes every OpenAI client.
    """
    client = Client.find(cluster)
    if delete:
        client.delete_endpoint(delete)
    elif model is not None:
        handle = _start(client, model, name, replicas)
        try:
            if wait:
                _print_changes(handle, quiet=json)
        except KeyboardInterrupt:
            print(
                f"{handle.name} goes on: `raytide serve` shows it, `raytide serve --delete {handle.name}` ends it",
                file=sys.stderr,
            )
            raise
        if json:
            as_json(handle.json())
        else:
            print(f"{handle.name} answers at {handle.base_url}" if wait else f"{handle.name} is being deployed")
        return
    statuses = client.endpoints()
    if json:
        as_json([to_json(status) for status in statuses])
        return
    rows = [
        (
            status.endpoint.name,
            status.endpoint.state,
            f"{status.ready_replicas}/{status.endpoint.target_replicas}",
            f"{status.ongoing:g}",
            format_usd(status.cost_micro_usd),
            status.base_url,
            status.waiting.reason if status.waiting else status.endpoint.reason,
        )
        for status in statuses
    ]
    as_table(("ENDPOINT", "STATE", "REPLICAS", "REQUESTS", "COST", "URL", "WHY"), rows)


def _print_changes(handle: EndpointHandle, *, quiet: bool) -> None:
    line = ""
    for status in handle.watch():
        latest = f"{handle.name} is {status.endpoint.state}." + (f" {status.waiting.reason}" if status.waiting else "")
        if latest != line and not quiet:
            line = latest
            print(line, flush=True)


def _start(client: Client, model: str, name: str, replicas: str) -> EndpointHandle:
    tide = Tide(client)
    if model.endswith((".yaml", ".yml")):
        return tide.serve(ServeSpec.parse(load_yaml(model), where=model))
    low, _, high = replicas.partition(":")
    try:
        bounds = (int(low), int(high or low))
    except ValueError:
        raise UsageError(f"--replicas {replicas} is no number.", hint="Write `2` or `1:4`.") from None
    return tide.serve(str(Path(model).resolve()), name=name, replicas=bounds)
