"""The commands `model`, for registered models, their versions, and their aliases."""

from __future__ import annotations

import json as json_
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_lines, as_list, as_result, as_table, local_time
from raytide.control.client import ApiClient
from raytide.control.views import to_json
from raytide.core.config import load_yaml
from raytide.core.errors import UsageError
from raytide.core.specs.model_version import AliasChange, ModelVersion, PromotionRule, RegisteredModel
from raytide.sdk.registry.models import ModelRegistry

model = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Manage registered models.")
Reference = Annotated[str, typer.Argument(help="A version: NAME:VERSION or NAME@ALIAS.")]
ModelName = Annotated[str, typer.Argument(help="A registered model.")]


@model.command("list")
def list_models(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The number of models, by name.")] = 100,
    offset: Annotated[int, typer.Option(min=0, help="The number of models to skip.")] = 0,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """List the models of your team, with their aliases."""
    found = _models(cluster).all(limit=limit, offset=offset)
    as_list(found, ("MODEL", "TEAM", "VERSIONS", "ALIASES", "NEWEST"), _model_row, json)


@model.command()
def register(
    name: Annotated[str, typer.Argument(help="The name of the model.")],
    source: Annotated[str, typer.Argument(help="A training job (job-7), or a model directory or its URL.")],
    job: Annotated[str, typer.Option(help="The job that made the directory, for its lineage.")] = "",
    metric: Annotated[list[str] | None, typer.Option(help="A result of an evaluation, NAME=NUMBER; repeat it.")] = None,
    note: Annotated[str, typer.Option(help="What is worth knowing about it.")] = "",
    team: Annotated[str, typer.Option(help="Its team; the one of your token by default.")] = "",
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Register a version of a model. A version never changes.

    The model's files are read on this machine, and their digest is stored. Registering the same version again returns
    the existing one.
    """
    metrics = _metrics(metric or ())
    version = _models(cluster).register(name, source, job=job, metrics=metrics, note=note, team=team)
    as_result(version, f"{version.id} is registered: {version.spec.location} (sha256 {version.spec.sha256[:12]})", json)


@model.command()
def show(
    which: Annotated[str, typer.Argument(help="A model, or a version: NAME:VERSION or NAME@ALIAS.")],
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show the versions of a model, or the lineage of one version."""
    client = ApiClient.find(cluster)
    if ":" in which or "@" in which:
        version = ModelRegistry(client).get(which)
        if json:
            as_json(version)
        else:
            as_lines(_lines(version), indent=12)
        return
    found, versions = client.model(which), client.model_versions(which)
    if json:
        as_json({**to_json(found), "shown": [to_json(version) for version in versions]})
        return
    rows = []
    for each in versions:
        names = " ".join(alias for alias, number in found.aliases.items() if number == each.version)
        about = (each.spec.lineage.job or "-", _numbers(each.spec.metrics), each.spec.location)
        rows.append((each.version, names or "-", each.user, local_time(each.created_at_s), *about))
    as_table(("VERSION", "ALIASES", "USER", "REGISTERED", "JOB", "METRICS", "LOCATION"), rows)


@model.command()
def promote(
    which: Annotated[str, typer.Argument(help="NAME:VERSION or NAME@ALIAS; with --remove, the NAME alone.")],
    alias: Annotated[
        str, typer.Option("--as", help="The alias: champion, challenger, or any other word.")
    ] = "champion",
    why: Annotated[str, typer.Option(help="The reason, for the history.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Let the alias name no version.")] = False,
    if_version: Annotated[
        int | None, typer.Option(min=0, help="Change nothing unless the alias names this version now; 0 for none.")
    ] = None,
    rule: Annotated[
        Path | None, typer.Option(help="A YAML file with the rule that must hold beside the version named now.")
    ] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Point an alias of a model at a version.

    The rule that --rule names sets limits on the version's metrics, and on their gains over the version that the
    alias names now. It can also require a result of the last A/B test between these two versions. An endpoint that
    was started by the alias keeps its version until you serve the alias again.
    """
    models = _models(cluster)
    if remove:
        change = models.remove_alias(which, alias, why=why)
    else:
        asked = None if rule is None else PromotionRule.parse(load_yaml(rule), where=str(rule))
        change = models.promote(which, alias, why=why, if_version=if_version, rule=asked)
    text = f"{change.name}@{change.alias} names {_named(change.after)}; before, {_named(change.before)}"
    as_result(change, text, json)


@model.command()
def history(
    name: ModelName,
    alias: Annotated[str | None, typer.Option(help="Only changes of this alias.")] = None,
    at: Annotated[
        str | None,
        typer.Option(
            help="The last change of each alias up to this time, among 1000: 2026-11-22T08:00, local without a zone."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The number of changes, newest first.")] = 100,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show the changes of a model's aliases: who made each change, when and why."""
    until_s = None if at is None else _time(at)
    changes = _models(cluster).history(name, alias=alias, until_s=until_s, limit=1000 if at else limit)
    if at is not None:
        newest: dict[str, AliasChange] = {}
        for each in changes:
            newest.setdefault(each.alias, each)
        changes = list(newest.values())
    as_list(changes, ("AT", "USER", "ALIAS", "FROM", "TO", "WHY"), _change_row, json)


@model.command()
def diff(before: Reference, after: Reference, cluster: ClusterName = None, json: Json = False) -> None:
    """Show the fields in which two versions differ: lineage, configuration, metrics and files."""
    found = _models(cluster).diff(before, after)
    columns = ("FIELD", before, after)
    as_list(found, columns, lambda each: (each.field, _short(each.before), _short(each.after)), json)


@model.command()
def verify(which: Reference, cluster: ClusterName = None, json: Json = False) -> None:
    """Check that the files of a version have not changed since it was registered."""
    found = _models(cluster).verify(which)
    as_result(found, f"{which} is intact: {found.files} files, {found.bytes:,} bytes, sha256 {found.sha256[:12]}", json)


def _model_row(each: RegisteredModel) -> tuple[object, ...]:
    aliases = " ".join(f"{alias}={version}" for alias, version in each.aliases.items()) or "-"
    return (each.name, each.team, each.versions, aliases, local_time(each.newest.created_at_s))


def _change_row(each: AliasChange) -> tuple[object, ...]:
    alias = f"{each.name}@{each.alias}"
    return (local_time(each.at_s), each.user, alias, each.before or "-", each.after or "-", each.why)


def _models(cluster: str | None) -> ModelRegistry:
    return ModelRegistry(ApiClient.find(cluster))


def _metrics(given: Sequence[str]) -> dict[str, float]:
    metrics = {}
    for each in given:
        name, separator, number = each.partition("=")
        if not separator or not name:
            raise UsageError(f"--metric {each!r} is not NAME=NUMBER.", hint="For example --metric ppl=12.3.")
        try:
            metrics[name] = float(number)
        except ValueError:
            raise UsageError(f"--metric {each!r} is not NAME=NUMBER.", hint="For example --metric ppl=12.3.") from None
    return metrics


def _lines(version: ModelVersion) -> list[str]:
    spec, lineage = version.spec, version.spec.lineage
    about = {
        "version": version.id,
        "team": spec.team,
        "registered": f"{local_time(version.created_at_s)} by {version.user}",
        "location": spec.location,
        "sha256": spec.sha256,
        "job": lineage.job,
        "dataset": lineage.dataset,
        "": f"manifest sha256 {lineage.dataset_sha256}" if lineage.dataset_sha256 else "",
        "base": lineage.base,
        "code": lineage.code,
        "metrics": _numbers(spec.metrics),
        "note": spec.note,
        "config": json_.dumps(lineage.config) if lineage.config else "",
    }
    return [f"{name:12}{value}" for name, value in about.items() if value]


def _numbers(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={value:g}" for name, value in metrics.items())


def _named(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"


def _short(value: object) -> str:
    return "-" if value is None else json_.dumps(value)[:80]


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError(f"--at {text!r} is no time.", hint="Write 2026-11-22T08:00.") from None
