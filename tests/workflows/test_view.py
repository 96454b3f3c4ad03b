"""The views of a flow fit into a job's progress, and its graph is an SVG."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from tests.workflows.test_planner import flow_of

from raytide.core.bounds import MOST_REPORTED, MOST_REPORTED_BYTES, MOST_REPORTED_CHARS
from raytide.workflows.spec import MOST_STAGES
from raytide.workflows.state import TrialState, begun, failed, finished, fresh, skipped
from raytide.workflows.view import as_progress, svg_of, views_of


@pytest.mark.parametrize("reason", ["x" * 500, "é" * 500, '"\\\n' * 200])
def test_the_progress_of_the_largest_flow_is_not_too_large_to_be_reported(reason: str) -> None:
    flow = flow_of({f"stage-{number:02}-{'x' * 30}": {} for number in range(MOST_STAGES)})
    state = fresh(flow, "run")
    for name in flow.stages:
        state = begun(state, name, "k" * 64, 1.7e9).with_stage(name, job="job-123456")
        state = failed(state, name, flow.stages[name], reason, 1.7e9)
    progress = as_progress(flow, state)
    assert len(progress) <= MOST_REPORTED
    assert all(len(value) <= MOST_REPORTED_CHARS for value in progress.values())
    assert len(json.dumps(progress)) <= MOST_REPORTED_BYTES - 1000
    views = views_of(flow, progress, 0.0)
    assert [view.status for view in views] == ["failed"] * MOST_STAGES
    assert all(view.why[:3] == reason[:3] for view in views)


def test_a_view_shows_state_time_result_and_reason() -> None:
    flow = flow_of({"a": {}, "b": {"needs": ["a"]}, "c": {"needs": ["b"]}})
    state = begun(fresh(flow, "run"), "a", "key", 100.0).with_stage("a", job="job-2")
    state = finished(state, "a", {}, {"steps": 3.0, "loss": 2.5}, "", 160.0)
    state = skipped(begun(state, "b", "key", 160.0), "b", "a.loss is 2.5, and the condition is a.loss < 2", 170.0)
    first, second, third = views_of(flow, as_progress(flow, state), 200.0)
    assert first.row() == ("a", "script", "done", "1m00s", "job-2", "loss 2.5, steps 3", "")
    assert second.row()[2:] == ("skipped", "10s", "", "", "a.loss is 2.5, and the condition is a.loss < 2")
    assert third.row()[2:4] == ("waiting", "")


def test_a_sweep_shows_its_trials_and_the_best_one() -> None:
    sweep = {"space": {"params.lr": {"low": 0.1, "high": 1.0}}, "trials": 4}
    flow = flow_of({"tune": {"sweep": sweep}})
    trials = (
        TrialState(params={"params.lr": 0.5}, status="done", value=2.0),
        TrialState(params={"params.lr": 0.25}, status="done", value=1.5),
        TrialState(params={"params.lr": 0.75}, status="ended"),
    )
    state = fresh(flow, "run").with_stage("tune", status="running", trials=trials)
    (view,) = views_of(flow, as_progress(flow, state), 0.0)
    assert view.result == "3 of 4 trials, 1 ended early; best loss 1.5 with params.lr=0.25"


def test_the_graph_is_well_formed_and_has_an_edge_for_each_need() -> None:
    flow = flow_of({"a": {}, "b": {"needs": ["a"]}, "c": {"needs": ["a", "b"]}})
    state = skipped(fresh(flow, "run"), "c", "<script>alert(1)</script> & more", 0.0)
    tree = ET.fromstring(svg_of(views_of(flow, as_progress(flow, state), 0.0)))
    name = "{http://www.w3.org/2000/svg}"
    assert len(tree.findall(f"{name}path")) == 3
    assert [box.findtext(f"{name}text") for box in tree.findall(f"{name}g")] == ["a", "b", "c"]
    places = [int(box.find(f"{name}rect").attrib["x"]) for box in tree.findall(f"{name}g")]  # type: ignore[union-attr]
    assert places[0] < places[1] < places[2]
    assert tree.find(f"{name}script") is None
