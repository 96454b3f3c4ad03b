"""The command `plan`. Without a cluster, it shows what a training or an endpoint needs, and what a budget buys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from raytide.cli.show import Json, as_json, as_table
from raytide.core.errors import UsageError

_GIB = 2**30


def plan(
    source: Annotated[
        str | None, typer.Argument(help="A training's YAML file, a model's directory or config.json, or a known model.")
    ] = None,
    cluster_file: Annotated[Path, typer.Option(help="The cluster.yaml with the node types.")] = Path("cluster.yaml"),
    by: Annotated[Literal["cost", "time"], typer.Option(help="What plans are ranked by.")] = "cost",
    hours: Annotated[float | None, typer.Option(min=0.01, help="The longest that the run may take.")] = None,
    tokens: Annotated[float | None, typer.Option(min=1, help="The tokens to train a model on.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a step.")] = None,
    top: Annotated[int, typer.Option(min=1, help="The number of plans to show.")] = 5,
    details: Annotated[bool, typer.Option("--details", help="Show the best plan's memory and time by term.")] = False,
    requests_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="Plan an endpoint for this rate instead of a training.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 300,
    ttft_s: Annotated[float | None, typer.Option(min=0.001, help="Seconds within which the first token comes.")] = None,
    tpot_s: Annotated[float | None, typer.Option(min=0.0001, help="Seconds between further tokens.")] = None,
    kv_dtype: Annotated[
        Literal["auto", "int8"], typer.Option(help="What an endpoint's KV caches hold: 16 bits a number, or 8.")
    ] = "auto",
    flops: Annotated[float | None, typer.Option(min=1e12, help="Show the best model for this compute instead.")] = None,
    usd: Annotated[float | None, typer.Option(min=0.01, help="Show the best model for this money instead.")] = None,
    served_tokens: Annotated[float, typer.Option(min=0, help="Tokens that the model will serve in its life.")] = 0.0,
    unique_tokens: Annotated[
        float | None, typer.Option(min=1, help="The tokens of the data; more of them are repetitions.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Correct a training's plan by what the runs of this cluster measured.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a training or an endpoint needs, and what a budget buys."""
    from raytide.control.client.api_client import ApiClient
    from raytide.sdk import plan as planner

    if flops is not None or usd is not None:
        _budget(flops, usd, hours, cluster_file, served_tokens, unique_tokens, json=json)
        return
    if source is None:
        raise UsageError("nothing to plan was given.", hint="Name a training's file or a model, or give --flops.")
    if requests_per_s is not None:
        from raytide.sizing.serving import ServingLoad

        load = ServingLoad(requests_per_s, prompt_tokens, output_tokens, ttft_s, tpot_s, kv_dtype)
        serving = planner.plan_serving(source, load, cluster_file=cluster_file)
        if json:
            as_json(serving.json())
        else:
            as_table(planner.SERVING_COLUMNS, serving.rows(top))
        return
    report = planner.plan(
        source,
        cluster_file=cluster_file,
        by=by,
        hours=hours,
        tokens=tokens,
        seq_len=seq_len,
        global_batch=global_batch,
        corrections=None if cluster is None else ApiClient.find(cluster).corrections(),
    )
    if json:
        as_json(report.json())
        return
    best = report.best  # raises where nothing fits
    as_table(planner.COLUMNS, report.rows(top))
    if details:
        print()
        as_table(("memory of one GPU", "GiB"), [(name, f"{b / _GIB:.2f}") for name, b in best.memory.terms.items()])
        print()
        parts = [(name, seconds) for name, seconds in best.step.parts.items() if seconds > 0]
        as_table(("time of a step", "s", "share"), [(n, f"{s:.4g}", f"{s / best.step.total:.1%}") for n, s in parts])


def _budget(
    flops: float | None,
    usd: float | None,
    hours: float | None,
    cluster_file: Path,
    served_tokens: float,
    unique_tokens: float | None,
    *,
    json: bool,
) -> None:
    """Shows the size of model and the tokens that a budget should train: one row for each scaling law, and rows for
    the served tokens and unique tokens that were given."""
    from raytide.sizing.scaling.budget import advise, flops_of_budget

    if flops is None:
        from raytide.core.objects.cluster_config import load_cluster

        assert usd is not None
        flops = flops_of_budget(usd, load_cluster(cluster_file).node_types, hours)
    rows = advise(flops, served_tokens, unique_tokens)
    if json:
        as_json({"flops": flops, "models": [row.json() for row in rows]})
        return
    columns = ("by", "parameters", "tokens", "tokens/parameter", "loss")
    as_table(columns, [row.cells() for row in rows])
