"""The cleaning report of a dataset as an HTML page: counts, samples of dropped documents, lengths and languages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from raytide.core.io.html import bar, framed, table, text_of
from raytide.core.io.token_dataset import TokenManifest
from raytide.pipelines.cleaning.report import CleaningReport

_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    "<title>{title}</title><style>body{{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;"
    "padding:0 1em;color-scheme:light dark}}section{{margin:2em 0}}pre{{white-space:pre-wrap;margin:0 0 1em;"
    "padding:.6em;border:1px solid rgba(128,128,128,.4);max-height:20em;overflow:auto}}"
    "h1{{font-size:1.4em}}h2{{font-size:1.1em}}</style></head><body>"
)


def inspection_page(
    dataset: str, manifest: TokenManifest, report: CleaningReport, samples: Sequence[Mapping[str, object]]
) -> str:
    """Returns the HTML page of a dataset. Each of `samples` has the fields `reason`, `file`, `row`, `detail` and
    `text`.
    """
    source = manifest.source
    reasons = sorted(source.dropped.items(), key=lambda each: -each[1])
    parts = [
        f"<h1>{escape(dataset)}</h1>",
        _section(
            table("documents", ("", ""), [("read", f"{source.read:,}"), ("kept", f"{source.kept:,}")]),
            _bars("dropped", reasons, source.read),
        ),
        _section(_lengths(report), _bars("languages", list(report.languages.items()), sum(report.languages.values()))),
        _section(_clusters(report), _bars("changes", list(report.changes.items()), sum(report.changes.values()))),
        *(_section(_samples(reason, samples)) for reason, _ in reasons),
    ]
    return _HEAD.format(title=escape(dataset)) + "".join(parts) + "</body></html>\n"


def share(count: int, total: int) -> str:
    """Returns a part of a whole as a percentage."""
    return f"{100 * count / total:.2f} %" if total else "-"


def lengths_of(report: CleaningReport) -> list[tuple[str, int, int]]:
    """Returns a row (range in characters, kept, dropped) for each non-empty range of document lengths."""
    return [
        (f"{(1 << size) >> 1:,} to {(1 << size) - 1:,}", kept, dropped)
        for size, (kept, dropped) in enumerate(zip(report.kept_lengths, report.dropped_lengths, strict=True))
        if kept or dropped
    ]


def _section(*parts: str) -> str:
    return f"<section>{''.join(framed(part) for part in parts if part)}</section>"


def _bars(title: str, counts: Sequence[tuple[str, int]], total: int) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{count:,}</td><td>{share(count, total)}</td><td>{bar(count, total)}</td></tr>"
        for name, count in counts
    )
    return f"<table><caption>{escape(title)}</caption><tbody>{rows}</tbody></table>" if rows else ""


def _lengths(report: CleaningReport) -> str:
    rows = lengths_of(report)
    largest = max((max(kept, dropped) for _, kept, dropped in rows), default=1)
    body = "".join(
        f"<tr><td>{name}</td><td>{kept:,}</td><td>{bar(kept, largest)}</td><td>{dropped:,}</td>"
        f"<td>{bar(dropped, largest)}</td></tr>"
        for name, kept, dropped in rows
    )
    head = "<thead><tr><th>characters</th><th>kept</th><th></th><th>dropped</th><th></th></tr></thead>"
    return f"<table><caption>lengths</caption>{head}<tbody>{body}</tbody></table>" if rows else ""


def _clusters(report: CleaningReport) -> str:
    if not report.near_duplicate_clusters:
        return ""
    rows = [("clusters", f"{report.near_duplicate_clusters:,}"), ("documents of the largest", report.largest_cluster)]
    return table("near-duplicates", ("", ""), rows)


def _samples(reason: str, samples: Sequence[Mapping[str, object]]) -> str:
    found = [sample for sample in samples if sample.get("reason") == reason]
    shown = "".join(
        f"<p>{escape(str(sample.get('file', '')))}, row {escape(str(sample.get('row', '')))}"
        f"{escape(': ' + text_of(sample['detail']) if sample.get('detail') else '')}</p>"
        f"<pre>{escape(str(sample.get('text', '')))}</pre>"
        for sample in found
    )
    return f"<h2>{escape(reason)}</h2>{shown}" if found else ""
