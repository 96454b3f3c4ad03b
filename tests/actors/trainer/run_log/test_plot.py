"""A run's files read back and drawn, also while it runs and after deaths."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.trainer.run_log import history, plot
from raytide.actors.trainer.run_log.history import RunHistory
from raytide.core.errors import DataError

SVG = "{http://www.w3.org/2000/svg}"


def line(step: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 9.0, "world": 2, **more}


def write(out: Path, metrics: list[dict[str, Any]], events: list[dict[str, Any]], torn: str = "") -> str:
    out.mkdir(exist_ok=True)
    for name, lines in (("metrics", metrics), ("events", events)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + torn)
    return str(out)


def drawn(steps: list[dict[str, Any]], events: list[dict[str, Any]] | None = None, title: str = "run") -> ET.Element:
    return ET.fromstring(plot.svg(RunHistory(steps, events or []), title))


def test_a_step_done_twice_counts_once_and_half_a_line_not_at_all(tmp_path: Path) -> None:
    out = write(
        tmp_path / "run", [line(1), line(2, 3.0), line(1, 1.5), line(2, 1.0)], [{"event": "ready"}], '{"step": 3'
    )
    run = history.read(out)
    assert [(each["step"], each["loss"]) for each in run.steps] == [(1, 1.5), (2, 1.0)]
    assert run.events == [{"event": "ready"}]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no run in .*nowhere"):
        history.read(str(tmp_path / "nowhere"))


def test_every_panel_has_its_curve_and_every_mark_its_reason() -> None:
    events = [
        {"event": "broke", "step": 2, "why": "rank 1 on <host> & co"},
        {"event": "resize", "step": 3, "why": "a member joins"},
        {"event": "not_applied", "step": 3, "why": "a spike"},
        {"event": "ready"},
    ]
    picture = drawn([line(1), line(2, None), line(3, 1.0, world=1)], events, title="a <run>")
    panels = len(plot.PANELS) + 1
    assert len(picture.findall(f"{SVG}polyline")) == panels
    marks = picture.findall(f"{SVG}line")
    assert len(marks) == 3 * panels
    assert "step 2: rank 1 on <host> & co" in {mark.findtext(f"{SVG}title") for mark in marks}
    assert len(picture.findall(f"{SVG}polyline")[0].attrib["points"].split()) == 2  # of the loss: one was no number
    assert {"a <run>", "broke", "resized", "not applied", "gradient norm"} <= {
        text.text for text in picture.iter(f"{SVG}text")
    }


def test_a_run_without_a_step_and_one_of_a_single_step_can_be_drawn() -> None:
    assert "no step yet" in {text.text for text in drawn([]).iter(f"{SVG}text")}
    assert len(drawn([line(7)]).findall(f"{SVG}polyline")) == len(plot.PANELS) + 1


def test_a_page_of_its_own_holds_the_picture() -> None:
    assert "<title>a &amp; b</title><svg " in plot.html(RunHistory([line(1)], []), "a & b")


@given(st.integers(2, 9), st.integers(1, 60), st.data())
def test_a_long_run_is_thinned_and_no_spike_is_lost(points: int, count: int, data: st.DataObject) -> None:
    spikes = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    lines = [line(at, 50.0 if at in spikes else 1.0) for at in range(count)]
    kept = plot.thinned(lines, points)
    assert len(kept) <= 2 * points
    assert [each["step"] for each in kept] == sorted(each["step"] for each in kept)
    assert kept[0]["step"] == 0 and kept[-1]["step"] == count - 1
    assert sum(each["loss"] == 50.0 for each in kept) >= min(len(spikes), 1)
