"""An alert's states: it waits, fires, ends, and goes on where it was after a restart."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dashboards.alerts.alert_examples import NOW_S, firing, message, resolved

from raytide.core.errors import StorageError, UsageError
from raytide.dashboards.alerts.payload import alerts_from_payload, payload_of
from raytide.dashboards.alerts.records import MOST_ALERTS, AlertRecords, Silence
from raytide.dashboards.alerts.states import Alert, AlertState, Observed, advance
from raytide.dashboards.history.points import Labels

A: Labels = (("node", "a"),)
B: Labels = (("node", "b"),)


def rule(*found: Labels, for_s: float = 60.0) -> Observed:
    return Observed("Sick", "critical", for_s, dict.fromkeys(found, 1.0), "{{ $labels.node }} is sick")


def run(steps: list[tuple[float, Observed]], records: AlertRecords) -> list[tuple[str, str]]:
    """Returns the states that were noted, oldest first."""
    for at_s, observed in steps:
        known = {alert.id: alert for alert in records.alerts("raytide")}
        records.save(advance(known, [observed], at_s), at_s)
    return [(each.labels["node"], str(each.state)) for each in reversed(records.episodes())]


def test_it_waits_for_its_time_fires_once_and_ends(tmp_path: Path) -> None:
    records = AlertRecords(tmp_path / "a")
    steps = [(NOW_S + 15 * i, rule(A)) for i in range(8)] + [(NOW_S + 200, rule())]
    assert run(steps, records) == [("a", "pending"), ("a", "firing"), ("a", "resolved")]
    (alert,) = records.alerts()
    assert alert.summary == "a is sick"
    assert alert.fired_at_s == NOW_S + 60


def test_what_ends_before_its_time_was_none(tmp_path: Path) -> None:
    records = AlertRecords(tmp_path / "a")
    run([(NOW_S, rule(A)), (NOW_S + 15, rule()), (NOW_S + 30, rule(A)), (NOW_S + 75, rule(A))], records)
    (alert,) = records.alerts()
    assert alert.state is AlertState.PENDING


def test_a_restarted_monitor_goes_on_with_the_time_that_has_passed(tmp_path: Path) -> None:
    run([(NOW_S, rule(A))], AlertRecords(tmp_path / "a"))
    run([(NOW_S + 60, rule(A))], AlertRecords(tmp_path / "a"))
    assert AlertRecords(tmp_path / "a").alerts()[0].state is AlertState.FIRING


def test_an_alert_that_fires_again_is_another_episode(tmp_path: Path) -> None:
    records = AlertRecords(tmp_path / "a")
    run([(NOW_S, rule(A, for_s=0))], records)
    first = records.alerts()[0].episode
    run([(NOW_S + 15, rule(for_s=0)), (NOW_S + 30, rule(A, for_s=0))], records)
    assert records.alerts()[0].episode != first


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30))
def test_no_state_is_skipped_and_each_label_is_for_itself(steps: list[tuple[bool, bool]]) -> None:
    known: dict[str, Alert] = {}
    allowed = {
        None: {AlertState.PENDING, AlertState.FIRING},
        AlertState.PENDING: {AlertState.FIRING, AlertState.RESOLVED},
        AlertState.FIRING: {AlertState.RESOLVED},
        AlertState.RESOLVED: {AlertState.PENDING},
    }
    for number, (has_a, has_b) in enumerate(steps):
        observed = rule(*([A] if has_a else []), *([B] if has_b else []), for_s=20)
        for alert in advance(known, [observed], NOW_S + 15 * number):
            before = known.get(alert.id)
            if before is None or before.state is not alert.state:
                assert alert.state in allowed[before.state if before else None]
            known[alert.id] = alert
        holding = {alert.labels for alert in known.values() if alert.state is not AlertState.RESOLVED}
        assert holding == {*([A] if has_a else []), *([B] if has_b else [])}


def test_alertmanager_s_messages_are_read_and_written_in_its_format(tmp_path: Path) -> None:
    (alert,) = alerts_from_payload(message(), NOW_S + 5)
    assert (alert.name, alert.severity, alert.labels) == ("NodeSick", "critical", (("node", "node-1"),))
    assert (alert.state, alert.fired_at_s, alert.source) == (AlertState.FIRING, NOW_S, "alertmanager")
    (again,) = alerts_from_payload(payload_of([firing()], "here"), NOW_S + 5)
    assert (again.id, again.episode, again.summary) == (firing().id, firing().episode, "it is sick")
    records = AlertRecords(tmp_path / "a")
    for _ in range(2):  # it repeats itself
        records.save(alerts_from_payload(message(), NOW_S + 5), NOW_S + 5)
    over = message(status="resolved", endsAt="2023-11-14T22:14:20Z")
    records.save(alerts_from_payload(over, NOW_S + 90), NOW_S + 90)
    assert [str(each.state) for each in records.episodes()] == ["resolved", "firing"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"version": "4"},
        {"version": "3", "alerts": []},
        {"version": "4", "alerts": [{}]},
        {"version": "4", "alerts": ["x"]},
        {"version": "4", "alerts": [{"labels": {"alertname": "A"}, "status": "odd"}]},
        {"version": "4", "alerts": [{}] * 3000},
    ],
)
def test_what_is_no_message_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        alerts_from_payload(body, NOW_S)


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.none(), st.lists(st.text()))))
def test_hostile_fields_of_a_message_do_no_harm(fields: dict[str, object]) -> None:
    labels = {"alertname": "A", **{key: str(value) for key, value in fields.items()}}
    body = message(labels=labels, annotations=fields, startsAt=str(fields), endsAt="9999-99-99")
    (alert,) = alerts_from_payload(body, NOW_S)
    assert alert.since_s <= NOW_S


def test_alerts_are_bounded_and_those_that_are_over_make_room(tmp_path: Path) -> None:
    records = AlertRecords(tmp_path / "a")
    records.save((firing(node=str(number)) for number in range(MOST_ALERTS + 5)), NOW_S)
    assert len(records.alerts()) == MOST_ALERTS
    records.save([resolved(alert, NOW_S + 1) for alert in records.alerts()[:10]], NOW_S + 1)
    records.save([firing("Other", NOW_S + 2)], NOW_S + 2)
    assert "Other" in {alert.name for alert in records.alerts()}
    records.prune(NOW_S + 100 * 86_400)
    assert records.episodes() == []


def test_a_silence_ends_and_is_lifted(tmp_path: Path) -> None:
    records = AlertRecords(tmp_path / "a")
    records.silence(Silence("Sick", NOW_S + 60, "ana", NOW_S))
    assert [each.name for each in records.silences(NOW_S + 59)] == ["Sick"]
    assert records.silences(NOW_S + 60) == []
    records.silence(Silence("Sick", NOW_S, "ana", NOW_S))
    assert records.silences(NOW_S) == []


def test_a_damaged_file_is_set_aside_and_a_new_one_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged = b"nothing of the kind" * 100
    (tmp_path / "a").write_bytes(damaged)
    records = AlertRecords(tmp_path / "a")
    records.save([firing()], NOW_S)
    assert len(records.alerts()) == 1
    (kept,) = tmp_path.glob("a.damaged-*")
    assert kept.read_bytes() == damaged
    assert [record.__dict__["set_aside"] for record in caplog.records] == [str(kept)]


def test_a_file_that_is_damaged_while_the_monitor_runs_fails_one_call(tmp_path: Path) -> None:
    records = AlertRecords(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(StorageError, match="a is damaged"):
        records.alerts()
    records.save([firing()], NOW_S)
    assert len(records.alerts()) == 1


def test_a_clock_that_is_set_back_delays_an_alert_by_its_own_time_only(tmp_path: Path) -> None:
    records = AlertRecords(tmp_path / "a")
    steps = [(NOW_S + 7200, rule(A)), (NOW_S, rule(A)), (NOW_S + 30, rule(A)), (NOW_S + 60, rule(A))]
    assert run(steps, records) == [("a", "pending"), ("a", "firing")]
