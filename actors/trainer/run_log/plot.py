"""Plots a run: loss, learning rate, gradient norm, tokens/s and ranks over its steps, as plain SVG without a library.

Failures, resizes and steps that were not applied are vertical lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from raytide.actors.trainer.run_log.history import Line, RunHistory

PANELS = (("loss", "loss"), ("lr", "learning rate"), ("grad_norm", "gradient norm"), ("tokens_per_s", "tokens/s"))
MARKS = {"broke": ("#c0392b", "broke"), "resize": ("#2980b9", "resized"), "not_applied": ("#d68910", "not applied")}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 860, 120, 76, 14, 40, 34
POINTS = 1500
"""Points per curve: more than the plot has columns would only enlarge the file."""

Point = tuple[float, float]


def svg(history: RunHistory, title: str) -> str:
    """Returns the plot; that of an empty run says so."""
    steps = thinned(history.steps)
    panels = [*PANELS, ("world", "ranks")]
    height = TOP + len(panels) * (HEIGHT + GAP)
    size = f'viewBox="0 0 {WIDTH} {height}" style="max-width:{WIDTH}px;font:12px sans-serif;background:#fff;color:#222"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>', _text(LEFT, 18, title, weight="bold")]
    if not steps:
        return "".join([*parts, _text(LEFT, 60, "no step yet"), "</svg>"])
    first, last = float(steps[0]["step"]), float(steps[-1]["step"])
    marks = [event for event in history.events if event.get("event") in MARKS and "step" in event]
    for index, kind in enumerate(sorted({str(event["event"]) for event in marks})):
        colour, label = MARKS[kind]
        parts.append(_text(WIDTH - RIGHT - 90 * index, 18, label, anchor="end", fill=colour))
    for index, (key, label) in enumerate(panels):
        points = [(float(line["step"]), float(line[key])) for line in steps if _is_number(line.get(key))]
        top = TOP + index * (HEIGHT + GAP)
        parts += _panel(points, label, top, (first, last), marks, stairs=key == "world")
    return "".join([*parts, "</svg>"])


def html(history: RunHistory, title: str) -> str:
    """Returns the plot as an HTML page."""
    return f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title>{svg(history, title)}\n"


def thinned(lines: Sequence[Line], points: int = POINTS) -> list[Line]:
    """Returns at most 2 * `points` lines, including both ends: the lines of least and greatest loss of each interval,
    so that no spike is lost."""
    if len(lines) <= 2 * points:
        return list(lines)
    selected = {0, len(lines) - 1}
    for column in range(points - 1):
        stretch = range(column * len(lines) // (points - 1), (column + 1) * len(lines) // (points - 1))
        by_loss = sorted(stretch, key=lambda at: lines[at]["loss"] if _is_number(lines[at]["loss"]) else math.inf)
        selected |= {by_loss[0], by_loss[-1]}
    return [lines[at] for at in sorted(selected)]


def _panel(points: list[Point], label: str, top: int, steps: Point, marks: list[Line], *, stairs: bool) -> list[str]:
    parts = [
        _text(LEFT, top - 6, label),
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
    ]
    for event in marks:
        x, (colour, _) = _across(float(event["step"]), steps), MARKS[str(event["event"])]
        hover = f"step {event['step']}: {event.get('why', event['event'])}"
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + HEIGHT}" stroke="{colour}" stroke-width="1.2">'
        parts.append(f"{line}<title>{escape(hover)}</title></line>")
    if not points:
        return parts
    low, high = min(y for _, y in points), max(y for _, y in points)
    low, high = (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))
    placed = [(_across(x, steps), top + HEIGHT - 4 - (y - low) / (high - low) * (HEIGHT - 8)) for x, y in points]
    if stairs:
        placed = [corner for at, (x, y) in enumerate(placed) for corner in ((x, placed[max(0, at - 1)][1]), (x, y))]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#1f4e79" stroke-width="1.3"/>')
    for value, y in ((high, top + 12), (low, top + HEIGHT - 4)):
        parts.append(_text(LEFT - 6, y, f"{value:.4g}", anchor="end"))
    for step, anchor in zip(steps, ("start", "end"), strict=True):
        parts.append(_text(_across(step, steps), top + HEIGHT + 13, f"{step:.0f}", anchor=anchor))
    return parts


def _across(step: float, steps: Point) -> float:
    first, last = steps
    share = (step - first) / (last - first) if last > first else 0.5
    return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", fill: str = "#222") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
