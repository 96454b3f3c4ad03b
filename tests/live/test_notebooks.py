"""The example notebooks are run by a real kernel on the session's cluster, and what they show is looked at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert.exporters import HTMLExporter
from nbformat import NotebookNode

import raytide as rt
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.job import JobState

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHROMIUM = "/usr/bin/chromium"
CELL_TIMEOUT_S = 300
PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>{}</title><style>:root{{color-scheme:light dark}}"
    "body{{background:Canvas;color:CanvasText;max-width:900px;margin:auto}}</style><body>{}</body></html>"
)


def executed(name: str, live: LocalCluster, folder: Path) -> NotebookNode:
    """Returns the notebook with its results. An error in a cell is one here."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    environment = {key: value for key, value in live.environment().items() if not key.startswith("RAY_")}
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return notebook


def shown(notebook: NotebookNode) -> list[str]:
    """Returns the HTML of all outputs, in their order; of one that was updated, the last."""
    return [
        output.data["text/html"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]


def page(notebook: NotebookNode, name: str) -> str:
    body, _ = HTMLExporter(template_name="basic").from_notebook_node(notebook)
    return PAGE.format(name, body)


def check_page(text: str, folder: Path) -> None:
    """Every reference stays on the page; Chromium shows it, light and dark, without an error or a request."""
    assert not re.search(r"<script|@import|url\(.?http|src=.https?:", text)
    file = folder / "notebook.html"
    file.write_text(text, encoding="utf-8")
    if not Path(CHROMIUM).exists():
        return
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            tab = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
            problems: list[Any] = []
            tab.on("console", lambda message, found=problems: found.append(message.text))
            tab.on("pageerror", lambda error, found=problems: found.append(str(error)))
            tab.on("request", lambda request, found=problems: found.append(request.url))
            tab.goto(file.as_uri())
            assert problems == [file.as_uri()], "the page itself, and nothing else"
            figures = tab.locator("svg.raytide-figure").all()
            sizes = [each.bounding_box() for each in figures]
            assert all(size is not None and size["width"] > 300 and size["height"] > 100 for size in sizes)
            inks = {figure.evaluate("each => getComputedStyle(each).color") for figure in figures}
            assert inks <= {"rgb(0, 0, 0)" if scheme == "light" else "rgb(255, 255, 255)"}
            tab.screenshot(path=str(folder / f"notebook-{scheme}.png"), full_page=True)
        browser.close()


def test_text_becomes_an_endpoint(live: LocalCluster, tide: rt.Client, tmp_path: Path) -> None:
    notebook = executed("from-text-to-an-endpoint", live, tmp_path)
    parts = shown(notebook)
    everything = "\n".join(parts)
    runs = {run.view.job.spec.name: run for run in tide.jobs()}
    training = runs["notebook-model"]
    assert training.state is JobState.SUCCEEDED and int(training.progress["step"]) == 40
    found = tide.client.call("GET", f"/v1/jobs/{training.id}/metrics", query={"points": 2000})
    assert isinstance(training, rt.TrainRun)
    assert found["steps"] == list(range(1, 41)) == [step["step"] for step in training.metrics()]
    assert found["values"]["loss"] == [step["loss"] for step in training.metrics()], "over the API as in its files"
    assert f"<caption>cluster {live.name}</caption>" in parts[0]
    assert f"train notebook-model ({training.id})" in everything, "the live view"
    assert '<progress value="40" max="40">' in everything
    assert 'id="curve-loss"' in everything and "nats per token" in everything
    assert "endpoint notebook-model" in everything and "1 of 1" in everything
    assert "24 of 24 answered" in everything and "kept first token 1000 ms, token 100 ms" in everything
    assert "cost by job" in parts[-1] and training.id in parts[-1]
    check_page(page(notebook, "from text to an endpoint"), tmp_path)


def test_cost_and_capacity_are_looked_at(live: LocalCluster, tide: rt.Client, tmp_path: Path) -> None:
    notebook = executed("cost-and-capacity", live, tmp_path)
    parts = shown(notebook)
    everything = "\n".join(parts)
    (gang,) = (run for run in tide.jobs() if run.view.job.spec.name == "notebook-gang")
    assert gang.state is JobState.SUCCEEDED
    assert f"<caption>gang of {gang.id}</caption>" in everything
    assert re.search(r"<td>1</td><td>node-[^<]+</td><td>ready</td>", everything), "its second member"
    for caption in ("jobs", "endpoints", "teams", "WhyView", "cost", "cost by team", "cost by node", "cost by day"):
        assert f"<caption>{caption}</caption>" in everything
    pictures = [out for cell in notebook.cells for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})]
    assert len(pictures) == 1
    check_page(page(notebook, "cost and capacity"), tmp_path)
