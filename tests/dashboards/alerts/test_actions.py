"""Alerts act once in each episode, within their limits, never twice, without raytide's secrets."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dashboards.alerts.alert_examples import NOW_S, firing, resolved

from raytide.core.errors import ClusterError, ConflictError
from raytide.core.telemetry.settings import AlertAction
from raytide.dashboards.alerts.actions import due_actions, entry_of
from raytide.dashboards.alerts.client import OperatorClient
from raytide.dashboards.alerts.records import ActionRecord, AlertRecords, Silence
from raytide.dashboards.alerts.runner import ActionRunner
from raytide.dashboards.alerts.states import Alert


class Killed(BaseException):
    """The process is gone: nothing catches this."""


class World(OperatorClient):
    """An API in memory: orders by id, as the real one keeps them. `fuse` kills at the n-th call."""

    def __init__(self, fuse: int = 1000) -> None:
        self.orders: dict[str, str] = {}
        self.calls: list[str] = []
        self.revision, self.fuse = 3, fuse
        self.is_away = False

    def _burn(self) -> None:
        self.fuse -= 1
        if self.fuse < 0:
            raise Killed

    def order(self, key: str, kind: str, subject: str, plan: Mapping[str, Any]) -> str:
        self._burn()
        if self.is_away:
            raise ClusterError("the API does not answer.")
        self.orders.setdefault(key, f"{kind} {subject}")
        self._burn()
        return "ordered"

    def rollback_target(self, endpoint: str) -> dict[str, Any]:
        self._burn()
        return {"revision": self.revision - 1, "from": self.revision}

    def roll_back(self, endpoint: str, plan: Mapping[str, Any]) -> str:
        self._burn()
        if self.revision == plan["from"]:
            self.calls.append(f"rollback {endpoint} to {plan['revision']}")
            self.revision += 1
        self._burn()
        return "done"

    def pause_budget(self, team: str) -> str:
        self.calls.append(f"pause {team}")
        return "paused"

    def note_action(self, record: ActionRecord, state: str, outcome: str) -> None:
        self.calls.append(f"audit {record.kind} {state}")


def action(do: str = "quarantine_node", alert: str = "NodeSick", **fields: Any) -> AlertAction:
    return AlertAction.parse({"alert": alert, "do": do, **fields}, where="test")


def runner(
    path: Path, world: World, *actions: AlertAction, environment: Mapping[str, str] | None = None
) -> ActionRunner:
    return ActionRunner(AlertRecords(path / "a"), actions, lambda: world, environment or {"PATH": "/usr/bin:/bin"})


def fire(path: Path, *alerts: Alert) -> None:
    AlertRecords(path / "a").save(alerts, NOW_S)


def states(path: Path) -> list[tuple[str, str, str]]:
    return [(each.kind, each.object, each.state) for each in AlertRecords(path / "a").actions()]


def test_an_alert_that_fires_for_months_acts_once(tmp_path: Path) -> None:
    world, records = World(), AlertRecords(tmp_path / "a")
    runner = ActionRunner(records, [action("rollback")], lambda: world)
    alert = firing(endpoint="chat")
    records.save([alert], NOW_S)
    for day in range(100):
        records.prune(NOW_S + day * 86_400)
        runner.run_due("raytide", NOW_S + day * 86_400)
    assert [call for call in world.calls if "rollback chat" in call] == ["rollback chat to 2"]
    records.save([resolved(alert, NOW_S + 100 * 86_400)], NOW_S + 100 * 86_400)
    records.prune(NOW_S + 100 * 86_400)
    assert records.actions() == []


def test_an_alert_acts_once_in_each_episode(tmp_path: Path) -> None:
    world = World()
    running = runner(tmp_path, world, action(cooldown_s=0))
    fire(tmp_path, firing())
    for later_s in range(3):
        running.run_due("raytide", NOW_S + later_s)
    assert list(world.orders.values()) == ["quarantine_node node-1"]
    fire(tmp_path, resolved(firing(), NOW_S + 9))
    fire(tmp_path, firing(at_s=NOW_S + 10))
    running.run_due("raytide", NOW_S + 11)
    assert len(world.orders) == 2
    assert running.counts == {("quarantine_node", "done"): 2}
    assert world.calls == ["audit quarantine_node done"] * 2


def test_the_cool_down_of_an_object_holds_it_back_until_it_is_over(tmp_path: Path) -> None:
    world = World()
    running = runner(tmp_path, world, action(cooldown_s=100))
    fire(tmp_path, firing())
    running.run_due("raytide", NOW_S)
    fire(tmp_path, resolved(firing(), NOW_S + 9), firing(node="node-2", at_s=NOW_S + 10))
    fire(tmp_path, firing(at_s=NOW_S + 10))
    running.run_due("raytide", NOW_S + 11)
    assert sorted(world.orders.values()) == ["quarantine_node node-1", "quarantine_node node-2"]
    assert ("quarantine_node", "node-1", "held") in states(tmp_path)
    running.run_due("raytide", NOW_S + 101)
    assert len(world.orders) == 3
    assert [state for _, _, state in states(tmp_path)] == ["done"] * 3


def test_the_rate_limit_counts_all_objects(tmp_path: Path) -> None:
    world = World()
    running = runner(tmp_path, world, action(most_per_h=2))
    fire(tmp_path, *(firing(node=f"node-{number}") for number in range(5)))
    running.run_due("raytide", NOW_S)
    assert len(world.orders) == 2
    running.run_due("raytide", NOW_S + 3599)
    assert len(world.orders) == 2
    running.run_due("raytide", NOW_S + 3601)
    assert len(world.orders) == 4


def test_an_action_that_stays_held_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    running = runner(tmp_path, World(), action(most_per_h=1))
    fire(tmp_path, firing(), firing(node="node-2"))
    running.run_due("raytide", NOW_S)
    before = (tmp_path / "a").read_bytes()
    (held,) = running.run_due("raytide", NOW_S + 1)
    assert held.state == "held"
    assert (tmp_path / "a").read_bytes() == before


def test_the_limits_count_an_action_that_many_held_ones_follow(tmp_path: Path) -> None:
    world = World()
    running = runner(tmp_path, world, action(most_per_h=1))
    fire(tmp_path, firing())
    running.run_due("raytide", NOW_S)
    copy = "INSERT INTO actions SELECT ?, at_s + 1, NULL, alert, kind, entry, object, 'held', plan, '' FROM actions"
    with closing(sqlite3.connect(tmp_path / "a")) as connection, connection:
        connection.executemany(f"{copy} WHERE state = 'done'", [(str(number),) for number in range(1000)])
    fire(tmp_path, firing(node="node-2"))
    running.run_due("raytide", NOW_S + 2)
    assert list(world.orders.values()) == ["quarantine_node node-1"]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10_000)), max_size=40),
    st.integers(1, 4),
    st.floats(0, 4000),
)
def test_no_history_of_alerts_passes_the_limits(
    alerts: list[tuple[int, float]], most_per_h: int, cooldown_s: float
) -> None:
    limits = action(most_per_h=most_per_h, cooldown_s=cooldown_s)
    log: list[ActionRecord] = []
    for number, at_s in sorted(alerts, key=lambda each: each[1]):
        for due in due_actions([firing(node=str(number), at_s=at_s)], [limits], log, (), at_s):
            if not due.held:
                done = (due.key, at_s, "NodeSick", limits.do, due.entry, due.object, "done", {})
                log.append(ActionRecord(*done))
    for record in log:
        hour = [each for each in log if 0 <= record.at_s - each.at_s < 3600]
        assert len(hour) <= most_per_h
        same = [each.at_s for each in log if each.object == record.object and each.at_s < record.at_s]
        assert all(record.at_s - at_s >= cooldown_s for at_s in same)


def test_a_dry_run_and_a_test_alert_say_what_they_would_do(tmp_path: Path) -> None:
    world = World()
    running = runner(tmp_path, world, action("rollback", dry_run=True), action("rollback", alert="Test"))
    fire(tmp_path, firing(endpoint="chat"), firing("Test", endpoint="chat", raytide_test="true"))
    running.run_due("raytide", NOW_S)
    assert [each.outcome for each in AlertRecords(tmp_path / "a").actions()] == [
        "it would: rollback chat to revision 2"
    ] * 2
    assert world.calls == ["audit rollback dry_run"] * 2


def test_silenced_alerts_and_those_of_another_source_do_nothing(tmp_path: Path) -> None:
    world = World()
    running = runner(tmp_path, world, action())
    fire(tmp_path, firing())
    assert running.run_due("alertmanager", NOW_S) == []
    AlertRecords(tmp_path / "a").silence(Silence("NodeSick", NOW_S + 60, "ana", NOW_S))
    assert running.run_due("raytide", NOW_S) == []
    assert len(running.run_due("raytide", NOW_S + 61)) == 1


def test_an_alert_that_does_not_name_the_object_fails_clearly(tmp_path: Path) -> None:
    running = runner(tmp_path, World(), action("pause_budget"))
    fire(tmp_path, firing())
    (record,) = running.run_due("raytide", NOW_S)
    assert (record.state, record.outcome) == ("failed", "the alert does not say which budget")


def test_a_failure_is_recorded(tmp_path: Path) -> None:
    world = World()
    world.is_away = True
    fire(tmp_path, firing())
    runner(tmp_path, world, action()).run_due("raytide", NOW_S)
    assert states(tmp_path) == [("quarantine_node", "node-1", "failed")]


@pytest.mark.parametrize("do", ["quarantine_node", "rollback"])
@pytest.mark.parametrize("fuse", range(5))
def test_a_monitor_that_is_killed_anywhere_does_each_action_once(tmp_path: Path, fuse: int, do: str) -> None:
    world = World(fuse)
    fire(tmp_path, firing(node="node-1", endpoint="chat"))
    try:
        runner(tmp_path, world, action(do)).run_due("raytide", NOW_S)
    except Killed:
        world.fuse = 1000
    again = runner(tmp_path, world, action(do))
    again.resume(NOW_S + 1)
    again.run_due("raytide", NOW_S + 2)
    assert [state for _, _, state in states(tmp_path)] == ["done"]
    if do == "rollback":
        assert [call for call in world.calls if call.startswith("rollback")] == ["rollback chat to 2"]
    else:
        assert list(world.orders.values()) == ["quarantine_node node-1"]


def test_an_interrupted_command_is_not_repeated(tmp_path: Path) -> None:
    command = action("command", command=[sys.executable, "-c", "raise SystemExit(9)"])
    records = AlertRecords(tmp_path / "a")
    begun = ("key-1234", NOW_S, "NodeSick", "command", entry_of(command), "x", "started", {})
    records.begin(ActionRecord(*begun))
    running = runner(tmp_path, World(), command)
    running.resume(NOW_S + 1)
    assert states(tmp_path) == [("command", "x", "interrupted")]
    assert not records.begin(ActionRecord(*begun))


def test_a_command_gets_the_alert_and_no_secrets(tmp_path: Path) -> None:
    program = "import json, os, sys; print(json.dumps([json.load(sys.stdin), dict(os.environ)]))"
    environment = {"PATH": "/usr/bin:/bin", "AWS_SECRET_ACCESS_KEY": "s3cret", "RAYTIDE_TOKEN": "t0ken", "RAY_X": "1"}
    running = runner(
        tmp_path, World(), action("command", command=[sys.executable, "-c", program]), environment=environment
    )
    fire(tmp_path, firing(node="node-1; rm -rf /"))
    running.run_due("raytide", NOW_S)
    (record,) = AlertRecords(tmp_path / "a").actions()
    alert, seen = json.loads(record.outcome[record.outcome.index("[") :])
    assert alert["labels"]["alertname"] == "NodeSick"
    assert seen["ALERT_NODE"] == "node-1; rm -rf /"
    assert not {"AWS_SECRET_ACCESS_KEY", "RAYTIDE_TOKEN", "RAY_X"} & seen.keys()


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    slow = action("command", command=["/bin/sh", "-c", "sleep 600 & sleep 600"], timeout_s=0.5)
    fire(tmp_path, firing())
    runner(tmp_path, World(), slow).run_due("raytide", NOW_S)
    (record,) = AlertRecords(tmp_path / "a").actions()
    assert record.state == "failed"
    assert "did not end within" in record.outcome


def test_the_daemon_of_a_killed_command_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemons: list[int] = []

    def communicate(process: subprocess.Popen[bytes], input: bytes = b"", timeout: float | None = None) -> None:
        assert timeout is not None  # else it waits for the daemon, too
        assert process.stdout is not None
        daemons.append(int(process.stdout.readline()))
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    program = "import subprocess as s; print(s.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)"
    fire(tmp_path, firing())
    try:
        runner(tmp_path, World(), action("command", command=[sys.executable, "-c", program])).run_due("raytide", NOW_S)
    finally:
        os.kill(daemons[0], signal.SIGKILL)
    ((_, _, state),) = states(tmp_path)
    assert state == "failed"


class Api:
    """An API with one endpoint `chat`."""

    def __init__(self, serves: int, previous: int, revisions: Mapping[int, str], rollout: str = "") -> None:
        rollouts = [{"rollout": {"number": 7, "state": rollout, "ended_at_s": None}}] if rollout else []
        listed = [{"number": number, "why": why} for number, why in sorted(revisions.items(), reverse=True)]
        self.answers = {"rollouts": rollouts, "revisions": listed, "chat": {"revision": serves, "previous": previous}}

    def call(self, method: str, path: str, body: object = None, query: object = None) -> Any:
        return self.answers[path.rpartition("/")[2]]


def test_a_rollback_goes_to_what_served_before_and_never_to_what_was_rolled_back() -> None:
    def target(api: Api) -> dict[str, Any]:
        return OperatorClient(api).rollback_target("chat")  # type: ignore[arg-type]

    assert target(Api(2, 1, {1: "", 2: ""}, "running")) == {"rollout": 7}
    assert target(Api(2, 1, {1: "", 2: ""}, "promoted")) == {"revision": 1, "from": 2}  # its champion drains
    assert target(Api(3, 1, {1: "", 2: "a canary that lost", 3: ""})) == {"revision": 1, "from": 3}
    with pytest.raises(ConflictError):
        target(Api(3, 2, {1: "", 2: "", 3: "rollback to revision 1"}))
