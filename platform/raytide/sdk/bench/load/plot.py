"""Draws the report of a load: its distributions with the SLO, and the load over time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from raytide.dashboards.figures.style import BLUE, GREEN, GREY, ORANGE, RED, Picture, distribution, label
from raytide.sdk.bench.load.report import BenchReport, in_flight

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT = 560
_MOST_POINTS = 5000
_BINS = 60
_LEAST_BIN_S = 0.1


def picture(report: BenchReport) -> Picture:
    """Returns a picture of the report in four panels: time to first token, inter-token latency, throughput with the
    number of open requests, and the individual requests.
    """

    def draw(figure: Figure) -> None:
        (first, inter), (flow, requests) = figure.subplots(2, 2)
        _first_token(first, report)
        _inter_token(inter, report)
        _flow(flow, report)
        _requests(requests, report)

    return Picture(draw, f"{report.spec.model}: {report.spec}", height=_HEIGHT)


def _first_token(axes: Axes, report: BenchReport) -> None:
    label(axes, "First token", x="ms", y="share of requests")
    distribution(axes, [1e3 * each.ttft_s for each in report.records if each.ttft_s is not None], BLUE)
    _bound(axes, report.spec.slo.ttft_s)


def _inter_token(axes: Axes, report: BenchReport) -> None:
    label(axes, "Between tokens", x="ms", y="share")
    gaps = [1e3 * gap for each in report.records for gap in each.gaps_s]
    distribution(axes, gaps[:: 1 + len(gaps) // _MOST_POINTS], GREY, "inter-token")
    distribution(
        axes, [1e3 * each.tpot_s for each in report.records if each.tpot_s is not None], BLUE, "mean of a request"
    )
    _bound(axes, report.spec.slo.tpot_s)
    if gaps:
        axes.legend(loc="lower right")


def _flow(axes: Axes, report: BenchReport) -> None:
    """Draws the tokens per second that arrived, and the number of open requests, over time."""
    label(axes, "Throughput", x="s", y="tokens/s")
    width_s = max(report.duration_s / _BINS, _LEAST_BIN_S)
    arrived: Counter[int] = Counter()
    for each in report.records:
        if each.ttft_s is not None:
            at_s = each.sent_s + each.ttft_s
            arrived[int(at_s / width_s)] += 1
            for gap in each.gaps_s:
                at_s += gap
                arrived[int(at_s / width_s)] += 1
    bins = range(max(arrived, default=0) + 1)
    axes.yaxis.label.set_color(GREEN)
    axes.stairs([arrived[at] / width_s for at in bins], [width_s * at for at in (*bins, len(bins))], color=GREEN)
    beside = axes.twinx()
    beside.grid(visible=False)
    beside.spines["right"].set_visible(True)
    beside.set_ylabel("open requests")
    changes = in_flight(report.records)
    beside.step([at for at, _ in changes], [count for _, count in changes], where="post", color=GREY, linewidth=0.8)
    beside.set_ylim(bottom=0)
    axes.set_ylim(bottom=0)


def _requests(axes: Axes, report: BenchReport) -> None:
    label(axes, "Each request", x="sent at, s", y="end to end, s")
    answered = [(each.sent_s, each.e2e_s) for each in report.records if each.is_answered]
    failed = [(each.sent_s, each.e2e_s) for each in report.records if each.error]
    for points, colour, name in ((answered, BLUE, "answered"), (failed, RED, "failed")):
        if points:
            axes.plot(*zip(*points, strict=True), ".", color=colour, markersize=3, label=name)
    axes.set_ylim(bottom=0)
    if failed:
        axes.legend(loc="upper left")


def _bound(axes: Axes, bound_s: float | None) -> None:
    if bound_s is not None:
        axes.axvline(1e3 * bound_s, color=ORANGE, linestyle="--", label="SLO")
