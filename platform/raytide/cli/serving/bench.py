"""The commands `bench endpoint`, which puts load on an endpoint, and `bench node`, which measures a node type before it
is used.
"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from raytide.cli.show import ClusterName, Json, as_json, as_table, check_folder
from raytide.control.client import ApiClient
from raytide.core.config import environment
from raytide.core.errors import UsageError
from raytide.sdk.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from raytide.sdk.bench import BenchProgress, BenchReport

_WIDTH = 110
"""The width of a table that is not printed on a terminal."""


class EndpointFirst(TyperGroup):
    """A command group that runs `bench chat` as `bench endpoint chat`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = ["endpoint", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    cls=EndpointFirst,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Load an endpoint or measure a node type.",
)


@bench.callback()
def benchmarks() -> None:
    """Put load on an endpoint, or measure a node type."""


@bench.command()
def endpoint(
    name: Annotated[
        str,
        typer.Argument(metavar="ENDPOINT", help="An endpoint, or the base URL of any OpenAI-compatible server."),
    ],
    model: Annotated[str, typer.Option(help="The model's name; the endpoint's by default.")] = "",
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", help="Closed loop: requests that are open at once; 8.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", "-r", help="Open loop: requests a second, however many are open.")
    ] = None,
    poisson: Annotated[bool, typer.Option("--poisson", help="Exponential gaps instead of constant ones.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded requests: JSON lines, Mooncake's or those of --records, or CSV.")
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="Times as fast as the trace was recorded.")] = 1.0,
    trace_scale: Annotated[float, typer.Option(help="The factor of the trace's lengths.")] = 1.0,
    requests: Annotated[int | None, typer.Option("--requests", "-n", help="The number of requests; 100.")] = None,
    duration_s: Annotated[float | None, typer.Option(help="The seconds after which none is sent any more.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="The length of random prompts: 512, or 128:1024.")] = "512",
    output_tokens: Annotated[str, typer.Option(help="The length of answers: 128, or 16:256.")] = "128",
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt in each line, or JSON lines with `prompt` and `output_tokens`.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Chats instead of completions.")] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Answers have exactly their length.")
    ] = True,
    body: Annotated[str, typer.Option(help="More fields of requests, as JSON: '{\"temperature\": 0.8}'.")] = "{}",
    slo: Annotated[str, typer.Option(help="ttft=300ms,tpot=40ms,e2e=5s; the endpoint's own by default.")] = "",
    warmup: Annotated[int, typer.Option(help="The requests before the measurement.")] = 8,
    timeout_s: Annotated[float, typer.Option(help="The seconds after which a request has failed.")] = 600.0,
    seed: Annotated[int, typer.Option(help="The seed of lengths, prompts and gaps.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw it into a .html, .svg or .png file.")] = None,
    records: Annotated[
        Path | None, typer.Option(help="Write a JSON line for each request; --trace sends them again.")
    ] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Send requests to an endpoint and measure its time to first token, inter-token latency, throughput, and goodput
    against its SLO.

    A key for the endpoint is taken from RAYTIDE_API_KEY. An interrupt stops the requests and reports the results so
    far.
    """
    options: dict[str, Any] = {
        "api": "chat" if chat else "completions",
        "concurrency": concurrency,
        "rate": rate,
        "poisson": poisson,
        "trace": None if trace is None else str(trace),
        "trace_speed": trace_speed,
        "trace_scale": trace_scale,
        "requests": requests,
        "duration_s": duration_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "prompts": None if prompts is None else str(prompts),
        "ignore_eos": ignore_eos,
        "body": _object(body),
        "warmup": warmup,
        "timeout_s": timeout_s,
        "seed": seed,
        **({"model": model} if model else {}),
        **({"slo": slo} if slo else {}),
    }
    check_folder(plot, records)
    if plot is not None:
        from raytide.dashboards.figures.style import check_format

        check_format(plot)
    report = _load(name, options, cluster, quiet=json)
    if plot is not None:
        report.plot().save(plot)
    if records is not None:
        report.write_records(records)
    if json:
        as_json(report.json())
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(report.table())
    if report.is_interrupted:
        raise typer.Exit(130)
    if not report.answered:
        raise typer.Exit(1)


@bench.command()
def node(
    node_type: Annotated[str, typer.Argument(metavar="TYPE", help="A node type of cluster.yaml.")],
    reference: Annotated[str, typer.Option(help="Another type, measured too: the `speed` is relative to it.")] = "",
    nodes: Annotated[int, typer.Option(min=1, help="The nodes to measure; from two on, also an all-reduce.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.01, help="The seconds for each figure.")] = 2.0,
    disk_mib: Annotated[int, typer.Option(min=0, help="The MiB that are written and read; 0 for none.")] = 512,
    write: Annotated[
        Path | None, typer.Option(help="Write the `speed` into the type's entry of this cluster.yaml.")
    ] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Measure the memory, matrix products, all-reduce and disk of a node type before you use the type. With
    --reference, also compute the type's `speed`.

    The measurement is a job of the queue. The job takes whole nodes and is charged for them.
    """
    from raytide.cli.serving.node_job import measure
    from raytide.sdk.bench.node.report import yaml_line

    if write is not None and not reference:
        raise UsageError("--write needs --reference: a speed is relative.", hint="Name a type whose speed is known.")
    if write is not None and not write.is_file():
        raise UsageError(f"there is no file {write}.", hint="--write takes the path of cluster.yaml.")
    client = Client(ApiClient.find(cluster))
    names = [node_type, *([reference] if reference else [])]
    reports = [measure(client, name, nodes=nodes, seconds=seconds, disk_mib=disk_mib) for name in names]
    speed = reports[0].speed(reports[1]) if reference else None
    change = None
    if write is not None and speed is not None:
        from raytide.sdk.bench.node.speed_entry import write_speed

        change = write_speed(write, node_type, speed, reference)
    if json:
        written = None if change is None else change.after
        as_json({"speed": speed, "written": written, "reports": [report.json() for report in reports]})
        return
    for report in reports:
        print(f"{report.node_type}: {len(report.nodes)} nodes, {report.job}")
        as_table(("FIGURE", "MEDIAN", "LEAST", "GREATEST", "UNIT"), report.rows())
        print()
    if change is not None:
        print(f"{change} `raytide up` takes it over.")
    elif speed is not None:
        print(f"for {node_type} in cluster.yaml:  {yaml_line(speed, reference)}")


def _load(name: str, options: dict[str, Any], cluster: str | None, *, quiet: bool) -> BenchReport:
    from raytide.sdk.bench import BenchSpec, LoadGenerator

    key = environment("API_KEY") or ""
    with _progress(quiet=quiet) as on_progress:
        if not name.startswith(("http://", "https://")):
            return Client(ApiClient.find(cluster)).endpoint(name).bench(api_key=key, on_progress=on_progress, **options)
        if "model" not in options:
            raise UsageError(f"--model names the model at {name}.", hint=f"`curl {name}/models` lists them.")
        return LoadGenerator(BenchSpec.parse({"base_url": name, **options}, where="bench"), api_key=key).run(
            on_progress
        )


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[BenchProgress], None]]:
    """Shows the progress of the load on a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("warming up", total=None, done="")

        def show(progress: BenchProgress) -> None:
            if progress.is_warming_up:
                return
            failed = f", {progress.failed:,} failed" if progress.failed else ""
            rate = progress.output_tokens / max(progress.elapsed_s, 1e-9)
            done = f"{progress.ended:,} of {progress.sent:,} sent have ended{failed}, {rate:,.0f} tokens/s"
            bar.update(task, description="load", total=progress.most_requests, completed=progress.ended, done=done)

        yield show


def _object(text: str) -> dict[str, Any]:
    try:
        found = jsonlib.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError("--body is no JSON object.", hint="""Write --body '{"temperature": 0.8}'.""")
    return found
