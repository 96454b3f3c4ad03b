"""Objects as HTML: every text is escaped, every field has its unit, and the style stays inside its piece."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from raytide.core.io import html
from raytide.core.io.html import ShownAsHtml, ShownList, ShownText


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Thing(ShownAsHtml):
    name: str
    cost_micro_usd: int = 2_000_000
    price_micro_usd_h: int = 3_000_000
    started_at_s: float = 0.0
    wait_s: float | None = 2.5
    colour: Colour = Colour.RED
    is_on: bool = True
    parts: tuple[str, ...] = ()
    labels: dict[str, int] = field(default_factory=dict)


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@given(st.text(max_size=50), st.text(max_size=50))
def test_no_text_becomes_markup(title: str, cell: str) -> None:
    tags = Parsed(html.framed(html.table(title, ("a", "b"), [(cell, 1)]))).tags
    assert tags == Parsed(html.framed(html.table("t", ("a", "b"), [("c", 1)]))).tags
    assert Parsed(ShownText(cell)._repr_html_()).tags == ["div", "style", "p"]


def test_every_field_has_its_name_and_unit() -> None:
    shown = Thing("<b>", parts=("x", "y"), labels={"k": 7})._repr_html_()
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0.0))
    for name, value in (
        ("name", "&lt;b&gt;"),
        ("cost", "$2.00"),
        ("price", "$3.00/h"),
        ("started at", day),
        ("wait", "2.5 s"),
        ("colour", "red"),
        ("is on", "yes"),
        ("parts", "x, y"),
        ("labels", "k: 7"),
    ):
        assert f"<td>{name}</td><td>{value}</td>" in shown
    assert "<td>wait</td><td>-</td>" in Thing("n", wait_s=None)._repr_html_()


def test_a_list_is_a_list_and_a_text_is_a_text() -> None:
    found = ShownList([3, 1], "numbers", ("number", "twice"), lambda n: (n, 2 * n))
    assert found == [3, 1] and sorted(found) == [1, 3]
    assert "<td>3</td><td>6</td>" in found._repr_html_()
    assert "none" in ShownList([], "numbers", ("number",), lambda n: (n,))._repr_html_()
    assert ShownText("why") == "why"


def test_a_long_table_says_how_much_it_leaves_out() -> None:
    shown = html.table("t", ("a",), [(n,) for n in range(1234)])
    assert shown.count("<tr>") == 1 + 200 + 1 and "and 1,034 more" in shown


def test_the_style_touches_nothing_outside() -> None:
    rules = html.STYLE.removeprefix("<style>").removesuffix("</style>").split("}")
    selectors = [each for rule in rules if rule for each in rule.partition("{")[0].split(",")]
    assert selectors and all(each.startswith(".raytide") for each in selectors)
    assert "url(" not in html.STYLE
