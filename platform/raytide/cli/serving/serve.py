"""The command `serve`, which starts, lists and ends endpoints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from raytide.actors.models.quantized.gguf.packaged_models import PACKAGED_MODELS
from raytide.cli.options import Labels, Pip, RequirementsFile, Spot, packages, resources
from raytide.cli.serving.endpoints import rollout_line
from raytide.cli.show import ClusterName, Json, as_json, as_list, as_result
from raytide.control.client import ApiClient
from raytide.control.views import EndpointStatus
from raytide.core.config import load_yaml
from raytide.core.errors import UsageError
from raytide.core.money import format_usd
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.specs.model_version import SCHEME
from raytide.sdk.client import Client
from raytide.sdk.jobs.script import parse_range, with_resources
from raytide.sdk.registry.models import named_model
from raytide.sdk.registry.rollouts import rollout_of
from raytide.sdk.serving.endpoint import EndpointHandle


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face directory or its URL, a GGUF file, smollm2, registry:NAME@ALIAS, or a ServeSpec in a "
            "YAML file."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The name of the endpoint and of its model.")] = "",
    replicas: Annotated[str, typer.Option(help="`2`, or `1:4` to follow the load; the default is 1.")] = "",
    slo_ttft_s: Annotated[
        float | None, typer.Option("--slo-ttft-s", help="The goal for the time to first token, in seconds.")
    ] = None,
    slo_target: Annotated[
        float | None, typer.Option(help="The share of requests to serve in time, such as 0.95, at the lowest cost.")
    ] = None,
    target_ongoing: Annotated[
        float | None, typer.Option(help="The number of requests per replica to aim at, without --slo-target.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs of each replica: 1, H100:8, or 0.5.")] = None,
    cpus: Annotated[float | None, typer.Option(min=0, help="CPUs of each replica; 1 without any request.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each replica: 64GiB.")] = None,
    spot: Spot = None,
    labels: Labels = None,
    pip: Pip = None,
    requirements: RequirementsFile = None,
    team: Annotated[str, typer.Option(help="The endpoint's team; the token's own by default.")] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Print which engine would run, and why; serve nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until a replica answers.")] = True,
    delete: Annotated[str, typer.Option(help="Delete the endpoint of this name.")] = "",
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Give the endpoint MODEL the spec of its last revision but one.")
    ] = False,
    canary: Annotated[
        str,
        typer.Option(
            metavar="FILE|defaults",
            help="Roll the model out beside what the endpoint serves, in the steps of a YAML file.",
        ),
    ] = "",
    shadow: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="Send copies of this share of requests to the model.")
    ] = None,
    ab: Annotated[
        str,
        typer.Option(
            metavar="PERCENT|FILE",
            help="Give the model this share of users until you decide; a YAML file may name a metric to compare.",
        ),
    ] = "",
    why: Annotated[str, typer.Option(help="The reason, for the history of a rollout.")] = "",
    weights: Annotated[
        str | None,
        typer.Option(help="Let the endpoint MODEL serve these weights of the same architecture; '' for its own."),
    ] = None,
    to: Annotated[int | None, typer.Option(min=1, help="The revision to roll back to.")] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Serve a model, or list what is served.

    The command prints an address that every OpenAI client can use. Options override the fields of a YAML file.
    """
    asked = {"slo_ttft_s": slo_ttft_s, "slo_target": slo_target, "target_ongoing": target_ongoing}
    if replicas:
        asked["min"], asked["max"] = parse_range(replicas, "--replicas")
    counts = {key: value for key, value in asked.items() if value is not None}
    needs = resources(gpus, cpus, memory, None, spot, labels)
    named = {
        key: value for key, value in (("name", name), ("team", team), ("pip", packages(pip, requirements))) if value
    }
    if model is None and (named or counts or needs or explain):
        raise UsageError("the model is missing.", hint="Name the model: `raytide serve MODEL ...`.")
    if to is not None and not rollback:
        raise UsageError("--to needs --rollback.", hint="`raytide serve NAME --rollback --to REVISION`.")
    if weights is not None and (model is None or named or counts or needs or explain or delete or rollback):
        raise UsageError("--weights takes no other options.", hint="`raytide serve NAME --weights LOCATION`.")
    if rollback and (named or counts or needs or explain or delete):
        raise UsageError("--rollback takes no other options.", hint="Serve the model again with the options.")
    if model is not None and delete:
        raise UsageError("a model and --delete cannot be combined.", hint="Run two commands.")
    rollout = rollout_of(_canary(canary), shadow, _ab(ab))
    if rollout is not None and (model is None or rollback or explain):
        raise UsageError("a rollout needs a model.", hint="`raytide serve MODEL --name ENDPOINT --canary defaults`.")
    if why and rollout is None:
        raise UsageError("--why is for rollouts.", hint="Add --canary, --shadow or --ab.")
    if model is not None and explain:
        _explain(_spec(model, named, counts, needs), json=json)
        return
    client = ApiClient.find(cluster)
    if weights is not None and model is not None:
        handle = EndpointHandle(client, client.endpoint(model)).swap_weights(_location(weights))
        as_json(handle.json()) if json else print(f"{model} serves {weights or 'the weights of its model'}")
    elif rollback:
        _roll_back(client, model, to, wait=wait, json=json)
    elif delete:
        client.delete_endpoint(delete)
    elif model is not None and rollout is not None:
        started = client.start_rollout(_spec(model, named, counts, needs), rollout, why)
        text = f"{rollout_line(started)}\n`raytide endpoint rollout {started.rollout.name}` shows how it goes"
        as_result(started, text, json)
        return
    elif model is not None:
        handle = Client(client).serve(_spec(model, named, counts, needs))
        try:
            if wait:
                _print_changes(handle, quiet=json)
        except KeyboardInterrupt:
            print(
                f"{handle.name} keeps running: `raytide serve` shows it, `raytide serve --delete {handle.name}` ends "
                "it",
                file=sys.stderr,
            )
            raise
        text = f"{handle.name} answers at {handle.base_url}" if wait else f"{handle.name} is being deployed"
        as_result(handle.json(), text, json)
        return
    columns = ("ENDPOINT", "STATE", "REPLICAS", "REQUESTS", "COST", "VERSION", "URL", "WHY")
    as_list(client.endpoints(), columns, _row, json)


def _row(status: EndpointStatus) -> tuple[object, ...]:
    endpoint, cost = status.endpoint, format_usd(status.cost_micro_usd)
    replicas = f"{status.ready_replicas}/{endpoint.target_replicas}"
    why = status.waiting.reason if status.waiting else endpoint.reason
    version = endpoint.spec.version or "-"
    return (endpoint.name, endpoint.state, replicas, f"{status.ongoing:g}", cost, version, status.base_url, why)


def _location(text: str) -> str:
    """Returns a local path made absolute. URLs, registry references and names of packaged models stay unchanged."""
    is_path = text and "://" not in text and not text.startswith(SCHEME) and text not in PACKAGED_MODELS
    return str(Path(text).resolve()) if is_path else text


def _roll_back(client: ApiClient, name: str | None, to: int | None, *, wait: bool, json: bool) -> None:
    if name is None:
        raise UsageError("the endpoint is missing.", hint="Name it: `raytide serve NAME --rollback`.")
    handle = EndpointHandle(client, client.roll_back(name, to))
    if wait:
        _print_changes(handle, quiet=json)
    if json:
        as_json(handle.json())
    else:
        newest = client.revisions(name)[0]
        print(f"{name} is at revision {newest.number}" + (f": {newest.why}" if newest.why else ""))


def _print_changes(handle: EndpointHandle, *, quiet: bool) -> None:
    if sys.stderr.isatty() and not quiet:
        handle.wait()
        return
    line = ""
    for status in handle.updates():
        latest = f"{handle.name} is {status.endpoint.state}." + (f" {status.waiting.reason}" if status.waiting else "")
        if latest != line and not quiet:
            line = latest
            print(line, flush=True)


def _canary(given: str) -> bool | dict[str, object]:
    """Returns the fields in a canary's file; True for the default steps, False for no canary."""
    return given == "defaults" or (dict(load_yaml(given)) if given else False)


def _ab(given: str) -> float | dict[str, object] | None:
    """Returns the challenger's percentage in an A/B test, or the fields of the test's file; None for no test."""
    try:
        return float(given) if given else None
    except ValueError:
        return dict(load_yaml(given))


def _explain(spec: ServeSpec, *, json: bool) -> None:
    from raytide.actors.serving.engines import check_members, choose_engine

    choice = choose_engine(spec)
    if choice.kind == "native":
        check_members(spec)
    text = f"{spec.name} runs on the {choice.kind} engine: {choice.why}"
    as_result({"name": spec.name, "engine": choice.kind, "why": choice.why}, text, json)


def _spec(
    model: str, named: Mapping[str, object], replicas: Mapping[str, float], needs: Mapping[str, object]
) -> ServeSpec:
    """Returns the spec of a YAML file or of a model. Options of the command line replace the file's fields."""
    if model.endswith((".yaml", ".yml")):
        fields, where = dict(load_yaml(model)), model
    else:
        fields, where = named_model(_location(model)), "serve"
    fields |= named
    own = fields.get("replicas", {})
    if replicas and isinstance(own, Mapping):  # the spec rejects anything else
        fields["replicas"] = {**own, **replicas}
    return with_resources(ServeSpec.parse(fields, where=where), needs)
