"""The curves of training runs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.trainer.run_log.history import RunHistory
from raytide.dashboards.figures import training
from raytide.dashboards.figures.training import PANELS, picture, thinned

SVG = "{http://www.w3.org/2000/svg}"


def line(step: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 9.0, "world": 2, **more}


def drawn(steps: list[dict[str, Any]], events: list[dict[str, Any]] | None = None, title: str = "run") -> ET.Element:
    return ET.fromstring(picture(RunHistory(steps, events or []), title).svg())


def curves(root: ET.Element) -> dict[str, ET.Element]:
    return {each.attrib["id"]: each for each in root.iter(f"{SVG}g") if each.get("id", "").startswith("curve-")}


def test_every_panel_has_its_curve_and_every_mark_its_reason() -> None:
    events = [
        {"event": "broke", "step": 2, "why": "rank 1 on <host> & co"},
        {"event": "resize", "step": 3, "why": "a member joins"},
        {"event": "not_applied", "step": 3, "why": "a spike"},
        {"event": "ready"},
    ]
    root = drawn([line(1), line(2, None), line(3, 1.0, world=1)], events, title="a <run>")
    assert curves(root).keys() == {f"curve-{key}" for key, _, _ in PANELS}
    marks = [each for each in root.iter(f"{SVG}g") if each.find(f"{SVG}title") is not None]
    assert len(marks) == 3 * len(PANELS)
    assert "step 2: rank 1 on <host> & co" in {mark.findtext(f"{SVG}title") for mark in marks}
    path = curves(root)["curve-loss"].find(f"{SVG}path")
    assert path is not None
    assert len(re.findall(r"[ML] ", path.attrib["d"])) == 2, "of the loss: one was no number"
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"a <run>", "broke", "resized", "not applied", "gradient norm", "tokens/s", "nats per token"} <= texts


def test_a_run_without_a_step_and_one_of_a_single_step_can_be_drawn() -> None:
    assert "no step yet" in {text.text for text in drawn([]).iter(f"{SVG}text")}
    assert len(curves(drawn([line(7)]))) == len(PANELS)


def test_a_page_of_its_own_holds_the_picture() -> None:
    page = picture(RunHistory([line(1)], []), "a & b").html()
    assert "<title>a &amp; b</title>" in page and "<body><svg " in page


def test_a_long_run_is_no_long_file() -> None:
    steps = [line(at, 1.0 + at % 7) for at in range(100_000)]
    assert len(thinned(steps)) <= 2 * training.POINTS


@given(st.integers(2, 9), st.integers(1, 60), st.data())
def test_a_long_run_is_thinned_and_no_spike_is_lost(points: int, count: int, data: st.DataObject) -> None:
    spikes = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    lines = [line(at, 50.0 if at in spikes else 1.0) for at in range(count)]
    kept = thinned(lines, points)
    assert len(kept) <= 2 * points
    assert [each["step"] for each in kept] == sorted(each["step"] for each in kept)
    assert kept[0]["step"] == 0 and kept[-1]["step"] == count - 1
    assert sum(each["loss"] == 50.0 for each in kept) >= min(len(spikes), 1)
