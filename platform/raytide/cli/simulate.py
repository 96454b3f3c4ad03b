"""The command `simulate` and its subcommands. The subcommands replay recorded traces with raytide's own decision code
or with a baseline policy. `simulate --from-live` starts from the state of the live cluster and looks ahead.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_lines, as_table
from raytide.core.clock import ago
from raytide.core.errors import UsageError
from raytide.core.money import format_usd

simulation = typer.Typer(rich_markup_mode=None, no_args_is_help=True, invoke_without_command=True)


@simulation.callback()
def options(
    context: typer.Context,
    from_live: Annotated[
        bool, typer.Option("--from-live", help="Continue from the present state on a virtual clock.")
    ] = False,
    hours: Annotated[float, typer.Option(help="The hours to simulate.")] = 1.0,
    launch_s: Annotated[
        float | None, typer.Option(help="Seconds until a new node joins; by default as measured.")
    ] = None,
    job_hours: Annotated[
        float | None, typer.Option(help="The hours that every job runs; by default none ends.")
    ] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Replay recorded traces, or look ahead (--from-live).

    The look ahead assumes that load and prices stay the same, that nothing is submitted, that every pool has stock, and
    that no node is lost.
    """
    if context.invoked_subcommand is not None:
        if from_live:
            raise UsageError("--from-live takes no command.", hint="Run `raytide simulate --from-live`.")
        return
    if not from_live:
        raise UsageError("a command or --from-live is missing.", hint="See `raytide simulate --help`.")
    from raytide.control.client import ApiClient
    from raytide.simulate.live.replay import look_ahead

    outlook = look_ahead(ApiClient.find(cluster).snapshot(), hours=hours, launch_s=launch_s, job_hours=job_hours)
    if json:
        as_json({**asdict(replace(outlook, plans=())), "plans": [plan.to_json() for plan in outlook.plans]})
        return
    from raytide.autoscaler.explain import AFTER_KIND, lines

    decisions = lines([plan.to_json() for plan in outlook.plans])
    as_lines(decisions or ["there is nothing to do"], indent=AFTER_KIND)
    if outlook.jobs:
        rows = [
            (job.job_id, job.name, "not yet" if job.after_s is None else f"in {ago(job.after_s)}", job.waits_for)
            for job in outlook.jobs
        ]
        as_table(("JOB", "NAME", "STARTS", "WAITS FOR"), rows)
    now, most, end = (
        format_usd(price)
        for price in (outlook.price_now_micro_usd_h, outlook.price_most_micro_usd_h, outlook.price_end_micro_usd_h)
    )
    print(f"{now} an hour now, {most} at most, {end} at the end; {format_usd(outlook.cost_micro_usd)} in {hours:g} h")


@simulation.command()
def deadline(
    spot: Annotated[Path, typer.Option(help="A JSON file of spot traces.")],
    collection: Annotated[str, typer.Option(help="Use the traces whose key contains this, cut to the shortest.")],
    policy: Annotated[
        str,
        typer.Option(help="raytide, greedy, uniform-progress (its variant C), uniform-progress-a, -b, -c, optimal."),
    ] = "raytide",
    zones: Annotated[str, typer.Option(help="The zones of one pool, separated by commas; all by default.")] = "",
    slack: Annotated[float, typer.Option(help="The spare time until the deadline, as a share of the work.")] = 0.25,
    hours: Annotated[float, typer.Option(help="The hours of work on one node.")] = 48.0,
    restart_hours: Annotated[float, typer.Option(help="The hours that every start wastes.")] = 0.2,
    starts: Annotated[int, typer.Option(help="The number of runs, spread evenly over the trace.")] = 12,
    gpu: Annotated[str | None, typer.Option(help="The GPU type, if the traces have several.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="The GPUs of a node, if the traces have several.")] = None,
    json: Json = False,
) -> None:
    """Run a job with a deadline on recorded spot markets.

    Costs are relative to the job's on-demand cost and averaged over the start times.
    """
    from raytide.simulate.deadline.compare import run
    from raytide.simulate.deadline.policies import policy as named
    from raytide.simulate.spot import read, select

    runs = named(policy)
    wanted = [zone.strip() for zone in zones.split(",") if zone.strip()]
    traces = select(read(spot), collection, gpu=gpu, gpus_per_node=gpus_per_node, zones=wanted)
    report = asdict(
        run(
            traces,
            runs,
            policy=policy,
            collection=collection,
            slack=slack,
            hours=hours,
            restart_h=restart_hours,
            count=starts,
        )
    )
    if json:
        as_json(report)
    else:
        as_table(("WHAT", "VALUE"), report.items())


@simulation.command()
def serving(
    requests: Annotated[
        Path, typer.Option(help="A CSV file with t_s, prompt_tokens, output_tokens; repeated to fill the days.")
    ],
    spot: Annotated[Path, typer.Option(help="A JSON file of spot traces.")],
    collection: Annotated[str, typer.Option(help="Use the traces whose key contains this, cut to the shortest.")],
    envelope: Annotated[
        Path | None, typer.Option(help="A CSV file with hour, requests; missing hours have none. Flat by default.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="The GPU of the traces.")] = "v100",
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of one node.")] = 1,
    kind: Annotated[str, typer.Option(help="`availability` or `preemption`.")] = "availability",
    depth: Annotated[int, typer.Option(help="Multiplies the nodes of each trace.")] = 4,
    policy: Annotated[
        str,
        typer.Option(help="`raytide`, `static`, `serve-ondemand`, `spot-naive`, or `spothedge-0` to `spothedge-4`."),
    ] = "raytide",
    queue: Annotated[
        str | None,
        typer.Option(
            help="Order of waiting requests: `deadline` (default of raytide) or `first-come` (of the others)."
        ),
    ] = None,
    resumes: Annotated[
        bool | None,
        typer.Option(help="Answers of lost nodes go on from their tokens (default of raytide) or start again."),
    ] = None,
    slo_ttft_s: Annotated[float, typer.Option(help="The goal for the time to first token, in seconds.")] = 5.0,
    slo_target: Annotated[float, typer.Option(help="The share of requests in time that raytide aims at.")] = 0.99,
    days: Annotated[float, typer.Option(help="The days to simulate; shorter traces are repeated.")] = 7.0,
    peak_rps: Annotated[float, typer.Option(help="Requests a second in the busiest hour.")] = 6.0,
    prefill_tps: Annotated[float, typer.Option(help="Prompt tokens a second of one replica.")] = 1500.0,
    slots: Annotated[int, typer.Option(help="Requests that one replica decodes at once.")] = 8,
    tpot_ms: Annotated[float, typer.Option(help="Milliseconds for each further token.")] = 60.0,
    max_replicas: Annotated[int, typer.Option(help="The most replicas of any policy.")] = 24,
    cold_start_s: Annotated[float, typer.Option(help="Seconds from launch to the first request; billed.")] = 180.0,
    notice_s: Annotated[float, typer.Option(help="Seconds of notice before a spot node is lost.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The seed of arrivals, of the traces' window and of node losses.")] = 0,
    ondemand_usd_h: Annotated[
        float | None, typer.Option(help="The price of an on-demand node; known for v100 and k80.")
    ] = None,
    spot_usd_h: Annotated[
        float | None, typer.Option(help="The constant price of a spot node; prices in the traces are ignored.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write an HTML page: cost against SLO, nodes over time.")] = None,
    json: Json = False,
) -> None:
    """Serve recorded requests on recorded spot capacity.

    Prints what a policy costs, how many requests it serves in time, and what an omniscient buyer would pay.
    """
    options: dict[str, Any] = {key: value for key, value in locals().items() if key not in ("plot", "json")}
    from raytide.core.objects.node import CapacityType
    from raytide.simulate.serving.compare import Scenario
    from raytide.simulate.serving.setup import ServingSetup

    setup = ServingSetup.parse(options, where="simulate serving")
    if plot is not None and not plot.parent.is_dir():
        raise UsageError(f"there is no folder {plot.parent} for the page.", hint="Create it, or name another.")
    stage = Scenario.of(setup)
    result = stage.run(setup.policy)
    bound_usd = stage.lower_bound_usd()
    if plot is not None:
        from raytide.simulate.serving.plot import write_page

        write_page(plot, stage, result, bound_usd)
    shown = {
        **setup.model_dump(mode="json"),
        "ondemand_usd_h": stage.usd_h[CapacityType.ON_DEMAND],
        "spot_usd_h": stage.usd_h[CapacityType.SPOT],
        **result.to_json(),
        "lower_bound_usd": bound_usd,
    }
    if json:
        as_json(shown)
    else:
        as_table(("NAME", "VALUE"), list(shown.items()))


@simulation.command()
def jobs(
    trace: Annotated[Path, typer.Option(help="A CSV file: submit_s, duration_s, num_gpus, vc.")],
    window: Annotated[str, typer.Option(help="`busiest`, or the number of the first day.")] = "busiest",
    days: Annotated[int, typer.Option(help="The length of the window.")] = 14,
    gpus: Annotated[int | None, typer.Option(help="The size of the cluster.")] = None,
    load: Annotated[float | None, typer.Option(help="Size the cluster so that the jobs need this share of it.")] = None,
    policy: Annotated[str, typer.Option(help="raytide, fifo, easy, drf, las, srpt.")] = "raytide",
    multi_gpu_share: Annotated[float, typer.Option(help="Redraw 1-GPU jobs until this share has several.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The seed of redrawn jobs.")] = 0,
    json: Json = False,
) -> None:
    """Run recorded training jobs through a queue.

    Only GPUs are counted, a restart takes 60 s, and durations are limited to the range from 30 s to 7 days.
    """
    from raytide.simulate.jobs.compare import Setting, simulate

    report = simulate(trace, Setting(window, days, gpus, load, policy, multi_gpu_share, seed))
    if json:
        as_json(report)
    else:
        as_table(("WHAT", "VALUE"), report.items())
