"""Formats the report of a load as text: one table of distributions, and one line for each of the other figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytide.core.io import html

if TYPE_CHECKING:
    from raytide.sdk.bench.load.report import BenchReport, Distribution

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_WIDE = 12


def table(report: BenchReport) -> RenderableType:
    times = Table("milliseconds")
    for column in (*COLUMNS, "n"):
        times.add_column(column, justify="right")
    for name, found in distributions(report):
        times.add_row(name, *(shown_ms(getattr(found, column)) for column in COLUMNS), f"{found.n:,}")
    title = Text(f"{report.spec.model}: {report.spec}", style="bold")
    return Group(title, times, *(_line(name, text) for name, text in figures(report)))


def as_html(report: BenchReport) -> str:
    rows = [
        (name, *(shown_ms(getattr(found, column)) for column in COLUMNS), f"{found.n:,}")
        for name, found in distributions(report)
    ]
    times = html.table(f"{report.spec.model}: {report.spec}", ("milliseconds", *COLUMNS, "n"), rows)
    return html.framed(times, html.table("", ("", ""), figures(report)))


def distributions(report: BenchReport) -> list[tuple[str, Distribution]]:
    """Returns the rows of the table of distributions: the name and the distribution of each measured time."""
    return [
        ("first token", report.ttft_s),
        ("inter-token", report.itl_s),
        ("per output token", report.tpot_s),
        ("end to end", report.e2e_s),
    ]


def figures(report: BenchReport) -> Iterator[tuple[str, str]]:
    """Yields the name and text of each figure that is not a distribution."""
    requests = f"{report.answered:,} of {report.sent:,} answered in {report.duration_s:.1f} s"
    yield "requests", requests + (f", interrupted with {report.unfinished:,} open" if report.is_interrupted else "")
    tokens = f"{report.output_tokens_per_s:,.1f} tokens/s generated, {report.total_tokens_per_s:,.1f} with the prompts"
    yield "throughput", f"{report.requests_per_s:,.2f} requests/s, {tokens}"
    cached = f", {report.cached_tokens / report.prompt_tokens:.0%} of them cached" if report.cached_tokens else ""
    yield "tokens", f"{report.prompt_tokens:,} of prompts{cached}, {report.output_tokens:,} generated"
    yield "in flight", f"{report.most_in_flight:,} at most"
    if not report.spec.slo.is_empty:
        share = report.good_requests / report.sent if report.sent else 0.0
        yield "goodput", f"{report.goodput_per_s:,.2f} requests/s, {share:.1%} of all, kept {report.spec.slo}"
    if report.errors:
        yield "errors", ", ".join(f"{count:,} {code}" for code, count in report.errors.items())
    load = report.generator
    late = ", ".join(
        f"{name} {shown_ms(each.tail)} ms late"
        for name, each in (("its loop", load.loop_late), ("requests", load.sent_late))
    )
    yield "generator", f"{load.cpu_share:.0%} of a core; in the tail {late}"
    if report.bottleneck:
        yield "BOTTLENECK", f"the generator itself: {report.bottleneck}; these figures are not the endpoint's"


def shown_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f}"


def _line(name: str, text: str) -> Text:
    style = "bold red" if name == "BOTTLENECK" else "red" if name == "errors" else ""
    return Text.assemble((f"{name:{_WIDE}}", "bold"), (text, style))
