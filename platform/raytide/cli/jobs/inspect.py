"""data inspect: what a build dropped and changed, in the terminal and as a page."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from raytide.cli.show import Json, as_json, as_table
from raytide.core.bounds import printable
from raytide.core.errors import DataError

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
