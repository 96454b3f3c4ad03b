"""A page with two charts: cost and SLO attainment of each policy, and one policy's nodes over time. SVG, no scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path

from raytide.simulate.serving.compare import Result, Scenario

CURVE = (0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
"""The targets that trace raytide's curve."""
OTHERS = ("serve-ondemand", *(f"spothedge-{extra}" for extra in range(5)))

_WIDTH, _HEIGHT, _MARGIN = 860, 320, 50
_MOST_POINTS = 1200
_STYLE = (
    "body{font:14px system-ui;margin:2em;max-width:900px}svg text{font:12px system-ui}"
    "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right}"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A mapping of values to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def around(cls, points: Sequence[tuple[float, float]]) -> Frame:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        return cls(min(xs), max(xs), min(ys), max(ys))

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x_low) / ((self.x_high - self.x_low) or 1.0)
        up = (y - self.y_low) / ((self.y_high - self.y_low) or 1.0)
        return _MARGIN + across * (_WIDTH - 2 * _MARGIN), _HEIGHT - _MARGIN - up * (_HEIGHT - 1.5 * _MARGIN)

    def axes(self, x_name: str, y_name: str) -> str:
        left, right, low, high = _MARGIN, _WIDTH - _MARGIN, _HEIGHT - _MARGIN, _MARGIN / 2
        return (
            f'<path d="M{left} {high}V{low}H{right}" fill="none" stroke="#999"/>'
            f'<text x="{left}" y="{low + 18}">{self.x_low:,.4g}</text>'
            f'<text x="{right}" y="{low + 18}" text-anchor="end">{self.x_high:,.6g} {escape(x_name)}</text>'
            f'<text x="{left - 6}" y="{low}" text-anchor="end">{self.y_low:.4g}</text>'
            f'<text x="{left - 6}" y="{high + 10}" text-anchor="end">{self.y_high:.4g}</text>'
            f'<text x="{left + 6}" y="{high + 10}">{escape(y_name)}</text>'
        )

    def line(self, points: Iterable[tuple[float, float]], colour: str) -> str:
        path = " ".join("{:.1f},{:.1f}".format(*self.at(*point)) for point in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    def dot(self, x: float, y: float, name: str, colour: str) -> str:
        px, py = self.at(x, y)
        label = f'<text x="{px + 7:.1f}" y="{py + 4:.1f}">{escape(name)}</text>'
        return f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}"/>{label}'


def write_page(path: Path, stage: Scenario, chosen: Result, bound_usd: float) -> None:
    """Runs the other policies and raytide's targets too, so it takes many times as long as one run."""
    others = [stage.run(name) for name in OTHERS]
    setups = [stage.setup.model_copy(update={"slo_target": target}) for target in CURVE]
    curve = [replace(stage, setup=setup).run("raytide") for setup in setups]
    path.write_text(page(chosen, others, curve, bound_usd), encoding="utf-8")


def page(chosen: Result, others: Sequence[Result], curve: Sequence[Result], bound_usd: float) -> str:
    title = f"raytide simulate serving: {escape(chosen.policy)}"
    rows = "".join(
        f"<tr><td>{escape(r.policy)}</td><td>{r.cost_usd:,.0f}</td><td>{100 * r.slo_attainment:.2f}</td></tr>"
        for r in (chosen, *others, *curve)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>{chosen.request_count:,} requests; lower bound ${bound_usd:,.0f}.</p>"
        f"<h2>Cost against SLO</h2>{_cost_against_slo(chosen, others, curve)}"
        f"<h2>Nodes over time</h2>{_nodes(chosen)}"
        f"<table><tr><th>policy</th><th>cost, $</th><th>in time, %</th></tr>{rows}</table></html>\n"
    )


def _cost_against_slo(chosen: Result, others: Sequence[Result], curve: Sequence[Result]) -> str:
    frame = Frame.around([_point(result) for result in (chosen, *others, *curve)])
    dots = [frame.dot(*_point(result), result.policy, "#777") for result in others]
    dots.append(frame.dot(*_point(chosen), chosen.policy, "#d40"))
    line = frame.line(sorted(_point(result) for result in curve), "#0a7")
    return svg([frame.axes("$", "requests in time, %; the line is raytide's curve"), line, *dots])


def _nodes(chosen: Result) -> str:
    samples = chosen.samples[:: max(1, len(chosen.samples) // _MOST_POINTS)]
    days = [sample.at_s / 86400.0 for sample in samples]
    counts = {
        "on demand": ("#d40", [sample.ondemand for sample in samples]),
        "spot": ("#0a7", [sample.spot for sample in samples]),
        "ready": ("#26c", [sample.ready for sample in samples]),
    }
    most = max(count for _, line in counts.values() for count in line)
    frame = Frame(0.0, days[-1], 0.0, float(most))
    parts = [frame.axes("days", "nodes")]
    for row, (name, (colour, line)) in enumerate(counts.items()):
        steps = list(zip(days, line, strict=True))
        parts.append(frame.line([corner for a, b in pairwise(steps) for corner in (a, (b[0], a[1]))], colour))
        parts.append(f'<text x="{_WIDTH - 2 * _MARGIN}" y="{20 + 16 * row}" fill="{colour}">{name}</text>')
    return svg(parts)


def _point(result: Result) -> tuple[float, float]:
    return result.cost_usd, 100 * result.slo_attainment


def svg(parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">{"".join(parts)}</svg>'
