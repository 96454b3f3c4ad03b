"""The committed dashboards are those that the panels make, and every query of theirs is PromQL over known metrics."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard
from tests.dashboards.prometheus_fixture import needs_prometheus, without_variables

from raytide.core.telemetry.catalogue import METRICS
from raytide.dashboards.grafana.boards import BOARDS
from raytide.dashboards.grafana.dashboard_files import FOLDER, dashboard, dashboard_files
from raytide.dashboards.grafana.panels import Board
from raytide.dashboards.prometheus.programs import find_program
from raytide.dashboards.rules.recordings import RECORDINGS

PREFIXES = ("raytide_", "DCGM_")


def test_the_committed_files_are_those_that_the_panels_make() -> None:
    assert {path.name: path.read_text() for path in FOLDER.glob("*.json")} == dashboard_files()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_do_not_overlap_and_have_units_legends_and_the_datasource_variable(board: Board) -> None:
    made = json.loads(json.dumps(dashboard(board)))
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert all(target["legendFormat"].strip() for target in panel["targets"]), panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert [each["name"] for each in made["templating"]["list"]] == ["datasource", *board.variables]


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yields the places where Grafana's types keep less than they are given, or something else."""
    if isinstance(given, dict):
        for key, value in given.items():
            if key in kept:
                yield from lost(value, kept[key], f"{path}.{key}")
            elif value not in (None, "", [], {}, False):
                yield f"{path}.{key}"
    elif isinstance(given, list):
        assert len(given) == len(kept), path
        for one, other in zip(given, kept, strict=True):
            yield from lost(one, other, path)
    elif given != kept:
        yield path


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_grafana_s_types_hold_all_of_a_dashboard(board: Board) -> None:
    register_default_plugins()
    given = json.loads(json.dumps(dashboard(board)))
    read = GrafanaDashboard.from_json(given)
    kept = json.loads(JSONEncoder(sort_keys=True).encode(read))
    # The title of a mark is the Prometheus datasource's own field.
    assert set(lost(given, kept)) == {".annotations.list.titleFormat"}


def test_dashboards_have_names_of_their_own() -> None:
    assert len({board.uid for board in BOARDS}) == len(BOARDS) == 6
    for board in BOARDS:
        titles = [panel.title for panel in board.panels]
        assert len(set(titles)) == len(titles), board.title


def test_every_metric_of_a_panel_is_in_the_catalogue() -> None:
    known = {f"{metric.exposed_name}{end}" for metric in METRICS.values() for end in ("", "_bucket", "_sum", "_count")}
    known |= {recording.name.split(":")[1] for recording in RECORDINGS}
    for board in BOARDS:
        for panel in board.panels:
            for query in panel.queries:
                used = re.findall(r"\b(?:raytide|DCGM)_\w+", query.promql(board.variables))
                assert set(used) <= known, panel.title


def test_a_query_is_narrowed_by_the_variables_that_its_metrics_have() -> None:
    serving = next(board for board in BOARDS if board.uid == "raytide-serving")
    queries = {panel.title: panel.queries[0].promql(serving.variables) for panel in serving.panels}
    assert queries["Requests by outcome"] == (
        'sum by (outcome) (rate(raytide_requests_total{endpoint=~"$endpoint"}[$__rate_interval]))'
    )
    assert queries["Error budget burn"] == 'endpoint:raytide_slo_burn:rate5m{endpoint=~"$endpoint"}'
    assert queries["Distribution of the first token"] == (
        'sum by (le) (rate(raytide_time_to_first_token_seconds_bucket{endpoint=~"$endpoint"}[$__rate_interval]))'
    )
    assert queries["Refused by limits"].endswith(" or on() vector(0)")


@needs_prometheus
def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    queries = [query.promql(board.variables) for board in BOARDS for panel in board.panels for query in panel.queries]
    rules = [{"record": f"panel:{i}", "expr": without_variables(query)} for i, query in enumerate(queries)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    program = find_program("promtool")
    assert program is not None
    done = subprocess.run(
        [program, "check", "rules", str(file)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
