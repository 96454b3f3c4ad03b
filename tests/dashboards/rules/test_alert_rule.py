"""A rule says the same in Prometheus' templates and in raytide's own summaries, and takes other bounds."""

import pytest

from raytide.core.errors import ConfigError
from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.alerts import ALERTS
from raytide.dashboards.rules.expressions import Absent, Condition, Selector, SetOperation, to_promql

RULE = AlertRule(
    "Late",
    "warning",
    SetOperation(Condition(Selector("a"), ">", 1), "and", Condition(Selector("b"), "<", 2)),
    60,
    "{endpoint} is late by {value:seconds}, {value:percent}, {value}",
    "Wait.",
    layer="application",
)


def test_summaries() -> None:
    assert RULE.summarize({"endpoint": "chat"}, 90.0) == "chat is late by 1.5 min, 9e+03%, 90"
    assert RULE.summary_template() == (
        "{{ $labels.endpoint }} is late by {{ $value | humanizeDuration }}, {{ $value | humanizePercentage }}, "
        '{{ $value | printf "%.4g" }}'
    )


def test_another_bound_is_that_of_the_first_comparison() -> None:
    assert to_promql(RULE.adjusted(bound=5, for_s=0).expr) == "(a > 5) and (b < 2)"
    assert RULE.adjusted(for_s=0).for_s == 0
    assert RULE.adjusted() == RULE


def test_a_rule_without_a_number_takes_no_bound() -> None:
    for expr in (Absent(Selector("a")), Condition(Selector("a"), ">", Selector("b"))):
        rule = AlertRule("Missing", "info", expr, 0, "It is missing", "Look.", layer="cost")
        with pytest.raises(ConfigError, match="Missing has no bound"):
            rule.adjusted(bound=1.0)


def test_alerts_have_names_of_their_own_and_texts_that_are_sentences() -> None:
    assert len({rule.name for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert not rule.summary.endswith("."), rule.name
        assert rule.runbook.endswith((".", "?")) and "{" not in rule.runbook, rule.name
        assert "{" not in rule.summarize({}, 0.5), rule.name
