"""The committed rule files are those that the rules make, and Prometheus accepts them and judges as it should."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.dashboards.prometheus_fixture import needs_prometheus
from tests.dashboards.rules.alert_cases import AlertCase, Samples
from tests.dashboards.rules.resource_alert_cases import CASES
from tests.dashboards.rules.test_evaluation import InMemory

from raytide.dashboards.prometheus.programs import find_program
from raytide.dashboards.rules.alerts import ALERTS, GROUPS, PROMETHEUS_ALERTS
from raytide.dashboards.rules.evaluation import Labels, Point, evaluate
from raytide.dashboards.rules.rule_files import FOLDER, rule_files

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "monitoring.md"
RULES = {rule.name: rule for rule in (*ALERTS, *PROMETHEUS_ALERTS)}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = find_program("promtool")
    assert program is not None
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=240, check=False)


def parsed(selector: str, values: str) -> tuple[str, Labels, list[Point]]:
    """Returns the name, labels and points of samples in promtool's notation, one a minute from time 0: `_` is a minute
    without a sample, and `stale` the end of a series.
    """
    name, _, rest = selector.partition("{")
    pairs = [pair.split("=") for pair in rest.rstrip("}").split(",") if pair]
    labels = tuple(sorted((label, value.strip('"')) for label, value in pairs if value != '""'))
    minute, points = 0, list[Point]()
    for part in values.split():
        start, times, count = part.partition("x")
        if start == "_":
            minute += int(count or 1)
            continue
        matched = re.fullmatch(r"(-?[^+-]+)([+-].+)?", start)
        assert matched is not None, part
        first = None if start == "stale" else float(matched[1])
        for i in range(int(count) + 1 if times else 1):
            points.append((60.0 * minute, None if first is None else first + i * float(matched[2] or 0)))
            minute += 1
    return name, labels, points


def stored(samples: Samples) -> InMemory:
    series: dict[str, dict[Labels, list[Point]]] = {}
    for selector, values in samples.items():
        name, labels, points = parsed(selector, values)
        series.setdefault(name, {})[labels] = points
    return InMemory(series)


def firing(case: AlertCase, samples: Samples) -> dict[Labels, float]:
    """Returns what has met the rule's expression in each minute of the last `for_s`."""
    rule, source = RULES[case.alert], stored(samples)
    minutes = range(case.at_min - rule.for_s // 60, case.at_min + 1)
    results = [evaluate(rule.expr, source, 60.0 * minute) for minute in minutes]
    return {labels: value for labels, value in results[-1].items() if all(labels in each for each in results)}


def promtool_test(case: AlertCase, samples: Samples, *, fires: bool) -> dict[str, object]:
    rule = RULES[case.alert]
    annotations = {"summary": case.summary, "runbook": rule.runbook}
    alert = {
        "exp_labels": {**case.labels, "severity": rule.severity, "layer": rule.layer},
        "exp_annotations": annotations | ({"action": rule.action} if rule.action else {}),
    }
    expected = {"eval_time": f"{case.at_min}m", "alertname": case.alert, "exp_alerts": [alert] if fires else []}
    return {
        "name": f"{case.alert} {'fires' if fires else 'is quiet'}",
        "interval": "1m",
        "input_series": [{"series": selector, "values": values} for selector, values in samples.items()],
        "alert_rule_test": [expected],
    }


def test_the_committed_files_are_those_that_the_rules_make() -> None:
    assert {path.name: path.read_text() for path in FOLDER.glob("*.yml")} == rule_files()


def test_each_alert_has_a_case() -> None:
    assert sorted(case.alert for case in CASES) == sorted(RULES)


@needs_prometheus
def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", *map(str, FOLDER.glob("*.yml")))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.parametrize("group", [*GROUPS, "prometheus"])
def test_promtool_finds_each_alert_firing_and_quiet_as_its_case_says(group: str, tmp_path: Path) -> None:
    names = {rule.name for rule in GROUPS.get(group, PROMETHEUS_ALERTS)}
    cases = [case for case in CASES if case.alert in names]
    tests = [promtool_test(case, case.fires, fires=True) for case in cases]
    tests += [promtool_test(case, case.quiet, fires=False) for case in cases]
    content = {
        "rule_files": [str(FOLDER / "recordings.yml"), str(FOLDER / f"{group}.yml")],
        "evaluation_interval": "1m",
        "group_eval_order": ["raytide-recordings", f"raytide-{group}"],
        "tests": tests,
    }
    file = tmp_path / "alerts.yml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_the_evaluator_judges_as_promtool_does(case: AlertCase) -> None:
    found = firing(case, case.fires)
    assert dict.fromkeys(found, True) == {tuple(sorted(case.labels.items())): True}
    assert firing(case, case.quiet) == {}


def test_an_alert_names_what_its_action_is_done_to() -> None:
    labels = {"quarantine_node": "node", "replace_node": "node", "rollback": "endpoint", "pause_budget": "team"}
    needed = {"restart_replica": {"endpoint", "replica"}, **{action: {label} for action, label in labels.items()}}
    for case in CASES:
        if action := RULES[case.alert].action:
            assert needed[action] <= case.labels.keys(), case.alert


def test_a_case_is_near_its_bound() -> None:
    """Each quiet case has samples, or it would say nothing."""
    assert [case.alert for case in CASES if not case.quiet or case.quiet == case.fires] == []


def test_the_documentation_lists_every_alert() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|.*\| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert listed == [(rule.name, rule.severity, rule.runbook) for rule in (*ALERTS, *PROMETHEUS_ALERTS)]
