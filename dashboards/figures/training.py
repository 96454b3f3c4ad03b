"""The curves of a training run over its steps, with its interruptions as vertical lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raytide.actors.trainer.run_log.history import Line, RunHistory
from raytide.dashboards.figures.style import BLUE, ORANGE, RED, VIOLET, Picture, label, line_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (
    ("loss", "loss", "nats per token"),
    ("lr", "learning rate", ""),
    ("grad_norm", "gradient norm", ""),
    ("tokens_per_s", "throughput", "tokens/s"),
    ("world", "ranks", ""),
)
"""The key in a step's line, the title and the unit of each panel."""
MARKS = {"broke": (RED, "broke"), "resize": (VIOLET, "resized"), "not_applied": (ORANGE, "not applied")}
POINTS = 1500
"""A curve has at most twice as many points: more of them than the plot has columns would only enlarge the file."""
_HEIGHT_OF_PANEL, _HEIGHT_OF_TITLE = 125, 60


def picture(history: RunHistory, title: str) -> Picture:
    """Returns a figure of the training curves. If the run has no step yet, the figure shows a text that says so."""
    steps = thinned(history.steps)

    def draw(figure: Figure) -> None:
        if not steps:
            figure.text(0.05, 0.4, "no step yet")
            return
        marks = [event for event in history.events if event.get("event") in MARKS and "step" in event]
        panels = figure.subplots(len(PANELS), 1, sharex=True)
        for axes, (key, name, unit) in zip(panels, PANELS, strict=True):
            _panel(axes, steps, marks, key)
            label(axes, name, y=unit)
        panels[-1].set_xlabel("step")
        for kind in sorted({str(event["event"]) for event in marks}):
            colour, name = MARKS[kind]
            panels[0].plot([], [], color=colour, label=name)
        if marks:
            panels[0].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(MARKS))

    height = _HEIGHT_OF_TITLE + (len(PANELS) * _HEIGHT_OF_PANEL if steps else 0)
    return Picture(draw, title, height=height)


def thinned(lines: Sequence[Line], points: int = POINTS) -> list[Line]:
    """Returns at most 2 * `points` of the lines, which have one step of the run each. No spike of the loss is left out.

    The lines are divided into `points - 1` equal intervals. The result has the first line, the last line, and the lines
    with the lowest and the highest loss of each interval.
    """
    if len(lines) <= 2 * points:
        return list(lines)
    selected = {0, len(lines) - 1}
    for column in range(points - 1):
        stretch = range(column * len(lines) // (points - 1), (column + 1) * len(lines) // (points - 1))
        by_loss = sorted(stretch, key=lambda at: lines[at]["loss"] if _is_number(lines[at]["loss"]) else math.inf)
        selected |= {by_loss[0], by_loss[-1]}
    return [lines[at] for at in sorted(selected)]


def _panel(axes: Axes, steps: Sequence[Line], marks: Sequence[Line], key: str) -> None:
    for event in marks:
        text = f"step {event['step']}: {event.get('why', event['event'])}"
        line_at(axes, float(event["step"]), MARKS[str(event["event"])][0], text)
    points = [(int(line["step"]), float(line[key])) for line in steps if _is_number(line.get(key))]
    if points:
        style = "steps-pre" if key == "world" else "default"
        (curve,) = axes.plot(*zip(*points, strict=True), color=BLUE, drawstyle=style)
        curve.set_gid(f"curve-{key}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
