"""The views of a flow: one row for each stage, and its graph as SVG. Both are made from the progress of the flow's
job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape

from raytide.core.bounds import shortened
from raytide.core.clock import ago
from raytide.core.io.html import ShownAsHtml
from raytide.workflows.graph import needs_of, order_of
from raytide.workflows.spec import FlowSpec
from raytide.workflows.state import FlowState, StageState, TrialState

_PREFIX = "flow/"
_MOST_CHARS = 6400
"""The most characters of all results and reasons together."""
_MOST_JOB = 80
_UNREPORTED = '["waiting","",null,null,0,"",""]'
_SHOWN_METRICS = 4
COLUMNS = ("stage", "kind", "state", "took", "job", "result", "why")
_BOX_W, _BOX_H, _GAP_X, _GAP_Y, _PAD = 150, 46, 48, 18, 8
_COLOURS = {"done": "#16a34a", "running": "#3b82f6", "failed": "#dc2626", "skipped": "#9ca3af", "waiting": "#9ca3af"}


@dataclass(frozen=True, slots=True)
class StageView(ShownAsHtml):
    """A stage of a run, as the driver last reported it."""

    name: str
    kind: str
    needs: tuple[str, ...]
    status: str = "waiting"
    job: str = ""
    seconds: float | None = None
    """The time from its first attempt to its end, or to the report."""
    is_cached: bool = False
    result: str = ""
    """A summary of its trials, its reference or URL, or its first metrics."""
    why: str = ""

    def row(self) -> tuple[object, ...]:
        status = "cached" if self.is_cached else self.status
        took = "" if self.seconds is None or self.is_cached else ago(self.seconds)
        return self.name, self.kind, status, took, self.job, self.result, self.why


def as_progress(flow: FlowSpec, state: FlowState) -> dict[str, str]:
    """Returns the progress that a driver reports. The key `stage` has a short text for tables of jobs. There is also
    one key for each stage of the flow, with a text that `views_of` parses.

    The more stages there are, the shorter the texts, because a job's progress is limited to 16 KiB.
    """
    most = _MOST_CHARS // len(flow.stages)
    found = {"stage": headline(state)}
    for name, stage in state.stages.items():
        result, why = _fitting(_result(flow, name, stage), most // 3), _fitting(stage.reason, most - most // 3)
        times = [None if at is None else round(at) for at in (stage.started_at_s, stage.ended_at_s)]
        shown = [stage.status, stage.job[:_MOST_JOB], *times, int(stage.is_cached), result, why]
        found[f"{_PREFIX}{name}"] = json.dumps(shown, separators=(",", ":"))
    return found


def _fitting(text: str, most: int) -> str:
    """Returns the text, truncated so that it has at most `most` characters when it is encoded as JSON within JSON."""
    while len(json.dumps(json.dumps(text))) > most + 6:  # six quotation marks and their escapes
        text = shortened(text, max(1, len(text) * 4 // 5))
        if len(text) == 1:
            return ""
    return text


def headline(state: FlowState) -> str:
    """Returns the state of a run in a few words."""
    counts = {
        word: [name for name, stage in state.stages.items() if stage.status == word]
        for word in ("running", "failed", "skipped", "done")
    }
    cycle = f"cycle {state.cycle}: " if state.cycle != 1 else ""
    if counts["running"]:
        return f"{cycle}{shortened(', '.join(counts['running']), 100)}"
    parts = [f"{len(names)} {word}" for word, names in counts.items() if names]
    return f"{cycle}{', '.join(parts) or 'waiting'}"


def views_of(flow: FlowSpec, progress: Mapping[str, float | int | str], now_s: float) -> list[StageView]:
    """Returns the views of all stages in the flow's order, from the progress that the flow's job reported."""
    views = []
    for name in order_of(flow):
        stage = flow.stages[name]
        text = str(progress.get(f"{_PREFIX}{name}") or _UNREPORTED)
        status, job, began, ended, is_cached, result, why = json.loads(text)
        seconds = None if began is None else max(0.0, (ended or now_s) - began)
        views.append(StageView(name, stage.kind, needs_of(stage), status, job, seconds, bool(is_cached), result, why))
    return views


@dataclass(frozen=True, slots=True)
class FlowGraph:
    """The graph of a flow. Notebooks show it as SVG."""

    views: tuple[StageView, ...] = field(default=())

    def _repr_svg_(self) -> str:
        return svg_of(self.views)

    def __str__(self) -> str:
        return svg_of(self.views)


def svg_of(views: Iterable[StageView]) -> str:
    """Draws the graph as SVG. Each stage is a box, to the right of all stages that it needs."""
    stages = {view.name: view for view in views}
    column: dict[str, int] = {}
    for view in stages.values():  # in order: what it needs comes before it
        column[view.name] = 1 + max((column[needed] for needed in view.needs), default=-1)
    rows: dict[int, int] = {}
    place: dict[str, tuple[int, int]] = {}
    for name, at in column.items():
        row = rows.get(at, 0)
        rows[at] = row + 1
        place[name] = _PAD + at * (_BOX_W + _GAP_X), _PAD + row * (_BOX_H + _GAP_Y)
    width = 2 * _PAD + (max(rows, default=0) + 1) * (_BOX_W + _GAP_X) - _GAP_X
    height = 2 * _PAD + max(rows.values(), default=0) * (_BOX_H + _GAP_Y) - _GAP_Y
    edges = (_edge(place[needed], place[view.name]) for view in stages.values() for needed in view.needs)
    boxes = (_box(view, *place[view.name]) for view in stages.values())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="graph of the flow" font-family="system-ui,sans-serif" font-size="12" '
        f'fill="currentColor">{"".join(edges)}{"".join(boxes)}</svg>'
    )


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1, x2, y2 = start[0] + _BOX_W, start[1] + _BOX_H // 2, end[0], end[1] + _BOX_H // 2
    bend = max(20, (x2 - x1) // 2)
    path = f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity=".35"/>'


def _box(view: StageView, x: int, y: int) -> str:
    colour, dashed = _COLOURS[view.status], ' stroke-dasharray="4 3"' if view.status in ("waiting", "skipped") else ""
    below = "cached" if view.is_cached else view.status
    below += f" · {view.result}" if view.result and view.status in ("done", "running") else ""
    title = escape(f"{view.name} ({view.kind}): {view.status} {view.why}".strip())
    return (
        f"<g><title>{title}</title>"
        f'<rect x="{x}" y="{y}" width="{_BOX_W}" height="{_BOX_H}" rx="6" fill="{colour}" fill-opacity=".08" '
        f'stroke="{colour}"{dashed}/>'
        f'<text x="{x + 10}" y="{y + 19}" font-weight="600">{escape(shortened(view.name, 20))}</text>'
        f'<text x="{x + 10}" y="{y + 36}" fill="{colour}">{escape(shortened(below, 22))}</text></g>'
    )


def _result(flow: FlowSpec, name: str, stage: StageState) -> str:
    sweep = flow.stages[name].sweep
    if sweep is not None and stage.trials:
        best = min(
            (trial for trial in stage.trials if trial.value is not None),
            key=lambda trial: (trial.value or 0.0) * (1 if sweep.mode == "min" else -1),
            default=None,
        )
        return trials_text(stage.trials, sweep.trials) + ("" if best is None else f"; best {_best(best, sweep.metric)}")
    if stage.outputs.get("reference"):
        return stage.outputs["reference"]
    if stage.outputs.get("url"):
        return stage.outputs["url"]
    chosen = sorted(stage.metrics, key=lambda metric: (not metric.endswith(("loss", "accuracy")), metric))
    return ", ".join(f"{metric} {stage.metrics[metric]:.5g}" for metric in chosen[:_SHOWN_METRICS])


def trials_text(trials: Iterable[TrialState], total: int) -> str:
    """Returns the counts of a sweep's trials as text: `9 of 16 trials, 5 ended early, 1 failed`."""
    statuses = [trial.status for trial in trials]
    over = sum(status != "running" for status in statuses)
    parts = [f"{over} of {total} trials"]
    parts += [f"{early} ended early"] if (early := statuses.count("ended")) else []
    parts += [f"{lost} failed"] if (lost := statuses.count("failed")) else []
    return ", ".join(parts)


def _best(trial: TrialState, metric: str) -> str:
    shown = ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in trial.params.items()
    )
    return f"{metric} {trial.value:.5g} with {shown}"
