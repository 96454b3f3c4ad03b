"""The subcommands of `endpoint`: an endpoint's revisions, rollouts and adapters, and the start-up times of its
replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_table, local_time
from raytide.control.client import ApiClient
from raytide.control.views import RevisionOutcome, RolloutStatus
from raytide.core.errors import NotFoundError, UsageError
from raytide.core.objects.endpoint import ADAPTER_SEPARATOR, EndpointRevision
from raytide.core.objects.endpoint_load import LOADING
from raytide.core.specs.live_changes import AdapterChange
from raytide.core.specs.model_version import SCHEME
from raytide.core.specs.rollout import RevisionFeedback, RolloutState
from raytide.registry.rollout.canary import CRITERIA
from raytide.sdk.serving.endpoint import EndpointHandle

PHASES = ("node", "process", "stage", "load", "warm-up")
endpoint = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Show endpoints, change their adapters, and end rollouts."
)


@endpoint.command()
def history(
    name: Annotated[str, typer.Argument(help="The endpoint.")], cluster: ClusterName = None, json: Json = False
) -> None:
    """List the revisions of an endpoint, newest first, and its rollouts.

    A rollout is shown with its author, time, reason and outcome.
    """
    client = ApiClient.find(cluster)
    revisions = client.revisions(name)
    if json:
        as_json(revisions)
        return
    thumbs = {each.revision: _judgements(each) for each in client.feedback(name)}
    rows = [_revision_row(each, thumbs.get(each.number, "-")) for each in revisions]
    as_table(("REVISION", "AT", "USER", "VERSION", "MODEL", "THUMBS", "WHY"), rows)
    if rollouts := client.rollouts(name):
        print()
        as_table(("AT", "USER", "ROLLOUT", "STATE", "WHY", "DECIDED", "BECAUSE"), [_row(each) for each in rollouts])


@endpoint.command()
def startup(
    name: Annotated[str, typer.Argument(help="The endpoint.")], cluster: ClusterName = None, json: Json = False
) -> None:
    """Show, for each replica of an endpoint, how long each phase of its start took.

    A running phase shows its time so far. These are the phases of a start: wait for a node, wait for a Ray process
    on the node, copy the model from the object store to the node, load the model, warm up the engine.
    """
    startups = ApiClient.find(cluster).endpoint(name).startups
    if json:
        as_json(startups)
        return
    rows = []
    for each in startups:
        seconds = dict(each.phases)
        last = len(each.phases) - (not each.is_ready)
        shown = [
            f"{seconds[phase]:.1f}" + ("..." if place >= last else "") if phase in seconds else "-"
            for place, phase in enumerate(PHASES)
        ]
        rows.append((each.id, *shown, f"{sum(seconds.values()):.1f}", each.detail or "-"))
    as_table(("REPLICA", *(f"{phase.upper()} (s)" for phase in PHASES), "ALL (s)", "MODEL"), rows)


@endpoint.command()
def rollout(
    name: Annotated[str, typer.Argument(help="The endpoint.")],
    stop: Annotated[bool, typer.Option("--stop", help="End it: the champion serves alone.")] = False,
    promote: Annotated[bool, typer.Option("--promote", help="Finish it: the challenger serves alone.")] = False,
    why: Annotated[str, typer.Option(help="The reason, for the history.")] = "",
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show the last rollout of an endpoint, with its state and the request counts of both revisions. With
    --stop or --promote, end the rollout.
    """
    if (stop and promote) or (why and not (stop or promote)):
        raise UsageError(
            "give one of --stop and --promote; --why explains it.", hint="`raytide endpoint rollout NAME`."
        )
    client = ApiClient.find(cluster)
    if stop or promote:
        status = client.end_rollout(name, "stop" if stop else "promote", why)
    elif not (found := client.rollouts(name, limit=1)):
        raise NotFoundError(f"endpoint {name} had no rollout yet.", hint="`raytide serve MODEL --name NAME --canary`.")
    else:
        status = found[0]
    if json:
        as_json(status)
        return
    print(rollout_line(status))
    sides = (("champion", status.champion), ("challenger", status.challenger))
    metrics = sorted({name for _, each in sides for name in each.shares} - set(CRITERIA))
    rows = [_outcome(side, each, metrics) for side, each in sides]
    bad = [f"BAD {name.removeprefix('metric ')}" for name in metrics]
    as_table(("", "REVISION", "VERSION", "REQUESTS", "FAILED", "LATE", "DISLIKED", *bad, "FIRST TOKEN", "EQUAL"), rows)


def rollout_line(status: RolloutStatus) -> str:
    """Returns one line that describes a rollout's state."""
    each = status.rollout
    share = f" with {each.percent:g} % of the traffic" if each.state is RolloutState.RUNNING else ""
    state = each.state.replace("_", " ")
    asked = f"; {each.asked} was asked for by {each.asked_by}" if each.asked and each.state.is_live else ""
    return f"{each.kind} of revision {each.challenger} of {each.name}: {state}{share}: {each.reason}{asked}"


@endpoint.command()
def adapters(
    name: Annotated[str, typer.Argument(help="The endpoint.")],
    load: Annotated[
        list[str] | None, typer.Option(help="An adapter to load, NAME=LOCATION (a directory, a URL or registry:...).")
    ] = None,
    unload: Annotated[list[str] | None, typer.Option(help="The name of an adapter to unload.")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the replicas have loaded them.")] = True,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Load and unload LoRA adapters while the endpoint runs, or list them.

    In the OpenAI API, each adapter is the model NAME:ADAPTER.
    """
    client = ApiClient.find(cluster)
    if load or unload:
        change = AdapterChange.parse({"load": _locations(load or ()), "unload": unload or ()}, where="adapters")
        handle = EndpointHandle(client, client.change_adapters(name, change))
        if wait and load:
            handle.wait_for_adapters()
    handle = EndpointHandle(client, client.endpoint(name))
    found = handle.adapters()
    if json:
        as_json(found)
        return
    rows = []
    for adapter, states in found.items():
        loaded = sum(not state for state in states)
        error = next((state for state in states if state not in ("", LOADING)), "")
        location = handle.status.endpoint.spec.adapters[adapter]
        rows.append((f"{name}{ADAPTER_SEPARATOR}{adapter}", f"{loaded}/{len(states)}", location, error or "-"))
    as_table(("MODEL", "LOADED", "LOCATION", "ERROR"), rows)


def _locations(given: Sequence[str]) -> dict[str, str]:
    locations = {}
    for each in given:
        name, separator, location = each.partition("=")
        if not separator or not location:
            raise UsageError(f"--load {each!r} is not NAME=LOCATION.", hint="For example --load polite=/models/polite.")
        is_path = "://" not in location and not location.startswith(SCHEME)
        locations[name] = str(Path(location).resolve()) if is_path else location
    return locations


def _revision_row(each: EndpointRevision, thumbs: str) -> tuple[object, ...]:
    version, model = (each.spec.version, each.spec.model) if each.spec else ("", f"unreadable: {each.unreadable}")
    return (each.number, local_time(each.at_s), each.user, version or "-", model, thumbs, each.why)


def _row(status: RolloutStatus) -> tuple[object, ...]:
    each = status.rollout
    decided = "-" if each.decided_at_s is None else local_time(each.decided_at_s)
    what = f"{each.kind} {each.champion} -> {each.challenger}"
    state = each.state.replace("_", " ")
    return (local_time(each.created_at_s), each.user, what, state, each.why or "-", decided, each.reason)


def _outcome(side: str, found: RevisionOutcome, metrics: Sequence[str]) -> tuple[object, ...]:
    shares = [_share(found.shares.get(name)) for name in (*CRITERIA, *metrics)]
    timed = found.counts.started
    first_s = f"{found.counts.first_token_ms / timed / 1000:.3f} s" if timed else "-"
    equal = f"{found.counts.equal} of {found.counts.compared}" if found.counts.compared else "-"
    return (side, found.revision, found.version or "-", found.counts.requests, *shares, first_s, equal)


def _judgements(found: RevisionFeedback) -> str:
    means = [f"{metric} {mean:.4g} of {number}" for metric, (number, mean) in found.metrics.items()]
    return ", ".join([f"{found.up} up, {found.down} down", *means])


def _share(found: tuple[float, float, float] | None) -> str:
    return "-" if found is None else f"{found[0]:.2%} ({found[1]:.2%} to {found[2]:.2%})"
