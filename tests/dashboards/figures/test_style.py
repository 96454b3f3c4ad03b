"""Figures are readable on any ground, ask nothing of the network, and never run what a name contains."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from raytide.core.errors import UsageError
from raytide.dashboards.figures.style import BLUE, RED, Picture, distribution, label, line_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVIL = '<script>alert("$x$")</script> -- & "'


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    label(axes, EVIL, x="step", y="loss, nats")
    axes.plot([1, 2, 3], [3.0, 2.0, 1.0], color=BLUE, label=EVIL)
    line_at(axes, 2.0, RED, f"broke: {EVIL}")
    distribution(axes, [1.0, 3.0], RED)


@pytest.fixture(scope="module")
def picture() -> Picture:
    return Picture(draw, f"run {EVIL}")


def test_names_are_text_and_nothing_else(picture: Picture) -> None:
    root = ET.fromstring(picture.svg())
    texts = ["".join(each.itertext()) for each in root.iter() if each.tag.endswith(("text", "title"))]
    assert any(EVIL in text for text in texts)
    assert f"broke: {EVIL}" in texts, "shown when a pointer is over the line"
    assert not [each for each in root.iter() if each.tag.endswith("script")]
    assert root.attrib["aria-label"] == f"run {EVIL}"


def test_a_figure_takes_the_colour_of_the_text_around_it(picture: Picture) -> None:
    svg = picture.svg()
    assert "currentColor" in svg and "#010203" not in svg
    assert not re.search(r"fill: ?#fff", svg), "no ground of its own"
    assert str(picture) == picture._repr_html_() == svg


def test_nothing_is_fetched_and_nothing_leaks_into_the_page(picture: Picture) -> None:
    for text in (picture.svg(), picture.html()):
        assert not re.search(r"(src|href)=.?https?:|@import|url\(http", text)
        assert "<script" not in text
    assert ".raytide-figure *{stroke-linejoin" in picture.svg()


def test_equal_figures_are_equal_files(picture: Picture, tmp_path: Path) -> None:
    first, second = (Picture(draw, "run").save(tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    assert b"background:#fff" in first


def test_other_formats_are_refused(picture: Picture, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        picture.save(tmp_path / "a.pdf")
    assert ".svg, .png or .html" in refused.value.hint
