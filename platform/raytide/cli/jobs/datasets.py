"""The commands for datasets. `data inspect` shows what a build dropped. `data list`, `show`, `diff` and `register`
manage registered versions.
"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_lines, as_list, as_result, as_table, local_time
from raytide.control.client import ApiClient
from raytide.control.views import to_json
from raytide.core.bounds import printable
from raytide.core.errors import DataError
from raytide.core.specs.data import RegisteredDataset
from raytide.sdk.registry.datasets import DatasetRegistry

Reference = Annotated[str, typer.Argument(help="A version: NAME:VERSION, or NAME for the newest.")]
_SHOWN_SPEC = ("inputs", "include", "exclude", "filter", "cleaning", "tokenizer", "seed")
_SHOWN_CHARS = 200


def inspect(
    dataset: Annotated[str, typer.Argument(help="The dataset's directory, as a path or a URL.")],
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    reason: Annotated[str | None, typer.Option(help="Show only samples dropped for this reason.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Samples to print for each reason.")] = 2,
    json: Json = False,
) -> None:
    """Show what a build dropped and changed, with samples."""
    from raytide.core.io.storage import join, read_bytes
    from raytide.core.io.token_dataset import load_manifest
    from raytide.pipelines.cleaning.page import inspection_page, lengths_of, share
    from raytide.pipelines.cleaning.report import REPORT, CleaningReport

    manifest = load_manifest(dataset)
    source = manifest.source
    if reason is not None and reason not in source.dropped:
        known = ", ".join(source.dropped) or "none"
        raise DataError(f"{dataset}: no document was dropped for {reason!r}.", hint=f"Its reasons: {known}.")
    report = CleaningReport()
    if source.cleaning is not None:
        where = join(dataset, REPORT)
        report = CleaningReport.from_bytes(read_bytes(where), where)
    drops = [] if source.samples is None else _lines(join(dataset, source.samples.file))
    drops = [drop for drop in drops if reason in (None, drop.get("reason"))]
    if html is not None:
        html.write_text(inspection_page(dataset, manifest, report, drops), encoding="utf-8")
    if json:
        body = report.model_dump(mode="json")
        as_json({"read": source.read, "kept": source.kept, "dropped": source.dropped, **body, "samples": drops})
        return
    print(f"{source.kept:,} of {source.read:,} documents kept ({share(source.kept, source.read)})")
    dropped = sorted(source.dropped.items(), key=lambda each: -each[1])
    as_table(("DROPPED", "DOCUMENTS", "SHARE"), [(name, count, share(count, source.read)) for name, count in dropped])
    for title, counts in (("CHANGED", report.changes), ("LANGUAGE", report.languages)):
        if counts:
            total = sum(counts.values())
            as_table((title, "COUNT", "SHARE"), [(name, count, share(count, total)) for name, count in counts.items()])
    if lengths := lengths_of(report):
        as_table(("CHARACTERS", "KEPT", "DROPPED"), lengths)
    for name, _ in dropped:
        for drop in [each for each in drops if each.get("reason") == name][:samples]:
            text = printable(str(drop.get("text", "")), _SHOWN_CHARS)
            print(f"{name}: {printable(str(drop.get('file')), 500)}, row {drop.get('row')}: {text}")
    if html is not None:
        print(f"page: {html}")


def _lines(url: str) -> list[dict[str, Any]]:
    """Returns the samples of dropped documents. Raises DataError if the file is malformed."""
    from raytide.core.io.storage import read_bytes

    found = []
    for number, line in enumerate(read_bytes(url).decode(errors="replace").split("\n")):
        if not line:
            continue
        try:
            body = jsonlib.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{url}, row {number} is not JSON: {error}.", hint="Build the dataset again.") from None
        if isinstance(body, dict):
            found.append(body)
    return found


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

    The card has the version's size and sources, and the jobs and models that used it.
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
    """Show the differences between two versions."""
    changes = _registry(cluster).diff(before, after)
    as_list(changes, ("FIELD", "BEFORE", "AFTER"), lambda each: (each.field, each.before, each.after), json)


def register(
    location: Annotated[str, typer.Argument(help="The dataset's directory or URL.")],
    name: Annotated[str, typer.Argument(help="The name to register it under.")],
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Register a dataset that was built elsewhere.

    Its files are checked. A dataset that raytide builds needs no such command, since its build registers it.
    """
    version = _registry(cluster).register(location, name)
    as_result(version, f"{version.id} is registered: {version.spec.tokens:,} tokens at {version.spec.location}", json)


def _row(each: RegisteredDataset) -> tuple[object, ...]:
    spec, at = each.newest.spec, local_time(each.newest.created_at_s)
    return (each.name, each.team, each.versions, f"{spec.documents:,}", f"{spec.tokens:,}", at)


def _registry(cluster: str | None) -> DatasetRegistry:
    return DatasetRegistry(ApiClient.find(cluster))
