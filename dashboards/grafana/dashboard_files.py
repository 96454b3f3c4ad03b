"""Writes the dashboards as Grafana's JSON.

`python -m raytide.dashboards.grafana.dashboard_files [FOLDER]` writes them into the folder. Without a folder it updates
the repository's own files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raytide.dashboards.grafana.boards import BOARDS
from raytide.dashboards.grafana.panels import Board, Panel

FOLDER = Path(__file__).parent / "generated"
_SCHEMA = 39
"""Grafana's version of the JSON format; later versions of Grafana migrate it."""
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _STAT, _CHART = 24, (4, 4), (8, 8)
_SOURCES = {
    "endpoint": "raytide_replicas_target",
    "job": "raytide_job_step",
    "node": "raytide_node_use_ratio",
    "team": "raytide_jobs",
}
"""The metrics whose labels fill the variables."""


def dashboard_files() -> dict[str, str]:
    """Returns the JSON of each dashboard by file name."""
    return {
        f"{board.uid.removeprefix('raytide-')}.json": json.dumps(dashboard(board), indent=1) + "\n" for board in BOARDS
    }


def dashboard(board: Board) -> dict[str, Any]:
    datasource = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus", "hide": 0}
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["raytide"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [datasource, *map(_variable, board.variables)]},
        "links": [
            {
                "title": "raytide",
                "type": "dashboards",
                "tags": ["raytide"],
                "asDropdown": True,
                "keepTime": True,
                "includeVars": False,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "annotations": {"list": [_alerts()]},
        "panels": list(_panels(board)),
    }


def _variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "datasource": _DATASOURCE,
        "query": {"query": f"label_values({_SOURCES[name]}, {name})", "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _alerts() -> dict[str, Any]:
    """Returns the annotations that mark on all curves the times at which an alert fires."""
    return {
        "name": "Alerts",
        "enable": True,
        "iconColor": "red",
        "datasource": _DATASOURCE,
        "expr": 'ALERTS{alertstate="firing", severity=~"critical|warning"}',
        "titleFormat": "{{alertname}}",
    }


def _panels(board: Board) -> Iterator[dict[str, Any]]:
    """Yields the rows and panels from left to right, from top to bottom."""
    number, top = 0, 0
    for title, panels in board.rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _at(0, top, _COLUMNS, 1),
        }
        left, top, tallest = 0, top + 1, 0
        for panel in panels:
            width, height = _STAT if panel.kind == "stat" else _CHART
            if left + width > _COLUMNS or (tallest and height != tallest):
                left, top = 0, top + tallest
            number, tallest = number + 1, height
            yield {"id": number, "gridPos": _at(left, top, width, height), **_panel(panel, board.variables)}
            left += width
        top += tallest


def _at(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel, variables: tuple[str, ...]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": query.promql(variables),
            "legendFormat": query.legend or panel.title,
            **({"format": "heatmap"} if panel.kind == "heatmap" else {}),
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": targets,
        "options": _options(panel),
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bound is not None:
        steps.append({"color": "red", "value": panel.bound})
    found: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.empty:
        found["noValue"] = panel.empty
    if panel.kind == "timeseries":
        found["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.is_stacked else 0,
            "stacking": {"mode": "normal" if panel.is_stacked else "none"},
            "thresholdsStyle": {"mode": "off" if panel.bound is None else "dashed"},
        }
    return found


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    """Returns the overrides that draw promised values, such as an SLO, as dashed lines."""
    dashed = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}}
    return [
        {"matcher": {"id": "byFrameRefID", "options": chr(ord("A") + index)}, "properties": [dashed]}
        for index, query in enumerate(panel.queries)
        if query.is_promise
    ]


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "stat":
            return {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
        case "heatmap":
            return {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Blues"}}
        case "timeseries":
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def write_dashboards(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in dashboard_files().items():
        (folder / name).write_text(content)


if __name__ == "__main__":
    write_dashboards(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
