"""Curves of several values of one object, such as a node, over the last seconds. Each value has a panel of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raytide.dashboards.figures.style import BLUE, Picture, label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT_OF_PANEL, _HEIGHT_OF_TITLE = 130, 50


def over_time(curves: Mapping[str, Sequence[float]], title: str, *, every_s: float) -> Picture:
    """Returns a figure with a panel for each curve. The points of a curve are `every_s` seconds apart. The last point
    is now.
    """

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, values) in zip(panels, curves.items(), strict=True):
            at_s = [every_s * (place + 1 - len(values)) for place in range(len(values))]
            axes.step(at_s, list(values), where="post", color=BLUE)
            axes.set_ylim(bottom=0)
            label(axes, name)
        panels[-1].set_xlabel("seconds from now")

    return Picture(draw, title, height=_HEIGHT_OF_TITLE + len(curves) * _HEIGHT_OF_PANEL)
