"""Writes an HTML page with two figures: cost and SLO attainment of each policy, and one policy's nodes over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from raytide.core.io import html
from raytide.dashboards.figures.style import BLUE, GREEN, GREY, ORANGE, Picture, label
from raytide.simulate.serving.compare import Result, Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE = (0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
"""The SLO targets at which raytide's curve is drawn."""
OTHERS = ("serve-ondemand", *(f"spothedge-{extra}" for extra in range(5)))

Point = tuple[float, float]
"""A point: dollars, and the percentage of requests in time."""
_MOST_POINTS = 1200
_HEIGHT = 360
_STYLE = (
    ":root{color-scheme:light dark}body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:900px;"
    "padding:0 1em;background:Canvas;color:CanvasText}"
)


def write_page(path: Path, stage: Scenario, chosen: Result, bound_usd: float) -> None:
    """Writes the HTML page. The call takes many times as long as one simulation, because it runs one simulation for
    each policy in `OTHERS`, and one of raytide's policy for each SLO target in `CURVE`.
    """
    others = [stage.run(name) for name in OTHERS]
    setups = [stage.setup.model_copy(update={"slo_target": target}) for target in CURVE]
    curve = [replace(stage, setup=setup).run("raytide") for setup in setups]
    path.write_text(page(chosen, others, curve, bound_usd), encoding="utf-8")


def page(chosen: Result, others: Sequence[Result], curve: Sequence[Result], bound_usd: float) -> str:
    title = f"raytide simulate serving: {escape(chosen.policy)}"
    rows = [(r.policy, f"{r.cost_usd:,.0f}", f"{100 * r.slo_attainment:.2f}") for r in (chosen, *others, *curve)]

    def costs(figure: Figure) -> None:
        points = {result.policy: _point(result) for result in others}
        tradeoff(figure.subplots(), [_point(result) for result in curve], points, {chosen.policy: _point(chosen)})

    def nodes(figure: Figure) -> None:
        _nodes(figure.subplots(), chosen)

    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>{chosen.request_count:,} requests; lower bound ${bound_usd:,.0f}.</p>"
        f"{Picture(costs, 'Cost against SLO', height=_HEIGHT)}{Picture(nodes, 'Nodes over time', height=_HEIGHT)}"
        f"{html.framed(html.table('', ('policy', 'cost, $', 'in time, %'), rows))}</html>\n"
    )


def tradeoff(
    axes: Axes, curve: Sequence[Point], others: Mapping[str, Point], chosen: Mapping[str, Point], title: str = ""
) -> None:
    """Draws each policy as a point. The axes are the policy's cost and the share of requests that were answered in
    time. raytide's results for several SLO targets form a curve.
    """
    label(axes, title, x="$", y="requests in time, %")
    if curve:
        axes.plot(*zip(*sorted(curve), strict=True), color=GREEN, label="raytide, by target")
        axes.legend(loc="lower right")
    for points, colour in ((others, GREY), (chosen, ORANGE)):
        for name, (cost_usd, percent) in points.items():
            axes.plot(cost_usd, percent, "o", color=colour, markersize=5)
            axes.annotate(name, (cost_usd, percent), xytext=(6, 3), textcoords="offset points", fontsize=8)


def _nodes(axes: Axes, chosen: Result) -> None:
    samples = chosen.samples[:: max(1, len(chosen.samples) // _MOST_POINTS)]
    days = [sample.at_s / 86400.0 for sample in samples]
    counts = (
        ("on demand", ORANGE, [sample.ondemand for sample in samples]),
        ("spot", GREEN, [sample.spot for sample in samples]),
        ("ready", BLUE, [sample.ready for sample in samples]),
    )
    label(axes, "", x="days", y="nodes")
    for name, colour, values in counts:
        axes.step(days, values, where="post", color=colour, label=name)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", ncols=len(counts))


def _point(result: Result) -> Point:
    return result.cost_usd, 100 * result.slo_attainment
