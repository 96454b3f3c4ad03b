"""data list, show, diff, register: the registered versions of datasets."""

from __future__ import annotations

from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_lines, as_list, as_result, local_time
from raytide.control.client import ApiClient
from raytide.control.views import to_json
from raytide.core.specs.data import RegisteredDataset
from raytide.sdk.registry.datasets import DatasetRegistry

Reference = Annotated[str, typer.Argument(help="A version: NAME:VERSION, or NAME for the newest.")]
_SHOWN_SPEC = ("inputs", "include", "exclude", "filter", "cleaning", "tokenizer", "seed")


def list_datasets(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The number of datasets, by name.")] = 100,
    offset: Annotated[int, typer.Option(min=0, help="The number of datasets to skip.")] = 0,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """List the datasets of your team."""
    found = _registry(cluster).all(limit=limit, offset=offset)
    as_list(found, ("DATASET", "TEAM", "VERSIONS", "DOCUMENTS", "TOKENS", "NEWEST"), _row, json)


def show(which: Reference, cluster: ClusterName = None, json: Json = False) -> None:
    """Show the card of a version.

    It has its size, what it was made of, and what was made of it.
    """
    registry = _registry(cluster)
    version = registry.get(which)
    uses, spec = registry.uses(version), version.spec
    if json:
        as_json({**to_json(version), "uses": to_json(uses)})
        return
    lines = {
        "dataset": version.id,
        "location": spec.location,
        "sha256": spec.sha256,
        "made by": spec.job or "-",
        "registered": f"{local_time(version.created_at_s)} by {version.user}",
        "documents": f"{spec.documents:,} of {spec.read:,} read",
        "dropped": ", ".join(f"{reason} {count:,}" for reason, count in spec.dropped.items()) or "none",
        "tokens": f"{spec.tokens:,}, of a vocabulary of {spec.vocab_size:,}",
        **{name: str(spec.config[name]) for name in _SHOWN_SPEC if spec.config.get(name)},
        "read by": ", ".join(uses.jobs) or "-",
        "models": ", ".join(uses.models) or "-",
    }
    as_lines((f"{name:<12}{value}" for name, value in lines.items()), indent=12)


def diff(before: Reference, after: Reference, cluster: ClusterName = None, json: Json = False) -> None:
    """Show in what two versions differ."""
    changes = _registry(cluster).diff(before, after)
    as_list(changes, ("FIELD", "BEFORE", "AFTER"), lambda each: (each.field, each.before, each.after), json)


def register(
    location: Annotated[str, typer.Argument(help="The dataset's directory or URL.")],
    name: Annotated[str, typer.Argument(help="The name to register it under.")],
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Register a dataset that was built elsewhere.

    Its files are checked. Builds register theirs by themselves.
    """
    version = _registry(cluster).register(location, name)
    as_result(version, f"{version.id} is registered: {version.spec.tokens:,} tokens at {version.spec.location}", json)


def _row(each: RegisteredDataset) -> tuple[object, ...]:
    spec, at = each.newest.spec, local_time(each.newest.created_at_s)
    return (each.name, each.team, each.versions, f"{spec.documents:,}", f"{spec.tokens:,}", at)


def _registry(cluster: str | None) -> DatasetRegistry:
    return DatasetRegistry(ApiClient.find(cluster))
