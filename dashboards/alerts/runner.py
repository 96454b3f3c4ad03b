"""Runs due actions. Each action takes effect at most once, even if this process is killed while the action runs.

An action is recorded before it begins. An interrupted order or rollback is run again, because that is safe: an order
has an id, and a rollback names its target revision. An interrupted command or webhook is not repeated.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raytide.core.errors import RaytideError, UsageError
from raytide.core.io.environment import WITH_COMMANDS, passed
from raytide.core.logs import logger
from raytide.core.telemetry.settings import AlertAction
from raytide.dashboards.alerts.actions import DueAction, due_actions
from raytide.dashboards.alerts.client import OperatorClient
from raytide.dashboards.alerts.payload import alert_json
from raytide.dashboards.alerts.records import ActionRecord, ActionState, AlertRecords
from raytide.dashboards.alerts.signing import post_signed
from raytide.dashboards.alerts.states import AlertSource

log = logger(__name__)

_MOST_OUTPUT = 1000
_KILL_S = 5.0
"""The longest wait for the end of a command that was killed."""
_ORDERS = ("restart_replica", "replace_node", "quarantine_node")


class ActionRunner:
    """Runs the actions of one cluster. Its methods block and must all be called from one thread."""

    def __init__(
        self,
        records: AlertRecords,
        actions: Sequence[AlertAction],
        client: Callable[[], OperatorClient],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._records, self._actions, self._client = records, actions, client
        self._environment = environment
        self.counts: Counter[tuple[str, str]] = Counter()
        """Actions by kind and outcome, since this process began."""

    def outcomes(self) -> Mapping[tuple[str, str], int]:
        """Returns the counts by kind and outcome. Failures start at 0, because an alert watches their increase."""
        return {**{(action.do, "failed"): 0 for action in self._actions}, **self.counts}

    def resume(self, now_s: float) -> None:
        """Continues the actions that an earlier process left unfinished, or records them as interrupted."""
        entries = {(action.alert, action.do): action for action in self._actions}
        for record in self._records.actions(with_held=False):
            if record.state != "started":
                continue
            action = entries.get((record.alert, record.kind))
            if record.kind in ("command", "webhook") or action is None:
                self._end(record, "interrupted", "the monitor ended in the middle of it; it is not done again", now_s)
            else:
                self._do(record, action, {}, now_s)

    def run_due(self, source: AlertSource, now_s: float) -> list[ActionRecord]:
        """Runs the actions that are due for the alerts of this source. Returns the records of the actions."""
        silenced = {silence.name for silence in self._records.silences(now_s)}
        begun = self._records.actions(with_held=False)  # else many delayed ones would hide those that limits count
        due = due_actions(self._records.alerts(source), self._actions, begun, silenced, now_s)
        return [record for each in due if (record := self._run(each, now_s)) is not None]

    def _run(self, due: DueAction, now_s: float) -> ActionRecord | None:
        state: ActionState = "started"
        outcome, plan = due.held, dict[str, Any]()
        if due.held:
            state = "held"
        elif not due.object:
            state, outcome = "failed", f"the alert does not say which {due.action.do.rpartition('_')[2]}"
        else:
            try:
                plan = self._plan(due)
            except RaytideError as error:
                state, outcome = "failed", str(error)
        if (due.action.dry_run or due.alert.is_test) and state == "started":
            state, outcome = "dry_run", f"it would: {_words(due, plan)}"
        ended_at_s = None if state in ("held", "started") else now_s
        made = (due.key, now_s, due.alert.name, due.action.do, due.entry, due.object, state, plan, outcome, ended_at_s)
        record = ActionRecord(*made)
        if not self._records.begin(record):
            return None
        if state == "started":
            self._do(record, due.action, alert_json(due.alert), now_s)
        elif state != "held":
            self._count(record, state, outcome)
        return record

    def _plan(self, due: DueAction) -> dict[str, Any]:
        """Returns the decisions that are recorded before the action begins, such as the target of a rollback."""
        why = f"alert {due.alert.name}: {due.alert.summary}"[:1000]
        if due.action.do in _ORDERS:
            return {"why": why, "endpoint": due.alert.label("endpoint")}
        if due.action.do == "rollback":
            return {"why": why, **self._client().rollback_target(due.object)}
        return {"why": why}

    def _do(self, record: ActionRecord, action: AlertAction, alert: Mapping[str, Any], now_s: float) -> None:
        try:
            outcome = self._act(record, action, alert)
        except (RaytideError, OSError, subprocess.SubprocessError) as error:
            self._end(record, "failed", str(error), now_s)
        else:
            self._end(record, "done", outcome, now_s)

    def _act(self, record: ActionRecord, action: AlertAction, alert: Mapping[str, Any]) -> str:
        match record.kind:
            case "restart_replica" | "replace_node" | "quarantine_node":
                return self._client().order(record.key, record.kind, record.object, record.plan)
            case "rollback":
                return self._client().roll_back(record.object, record.plan)
            case "pause_budget":
                return self._client().pause_budget(record.object)
            case "command":
                return self._command(action, alert)
            case "webhook":
                assert action.url is not None
                secret = self._environment.get(action.secret_env or "", "")
                if action.secret_env and not secret:
                    raise UsageError(f"{action.secret_env} is not set.", hint="Set it where the cluster is started.")
                return post_signed(action.url, dict(alert), secret, record.key, action.timeout_s)

    def _command(self, action: AlertAction, alert: Mapping[str, Any]) -> str:
        """Runs a user's command without raytide's secrets. Raises UsageError if it fails."""
        labels = {f"ALERT_{name.upper()}": str(value) for name, value in alert.get("labels", {}).items()}
        named = {name: value for name, value in labels.items() if name.isidentifier() and "\0" not in value}
        environment = {**passed(self._environment, WITH_COMMANDS), **named}
        process = subprocess.Popen(  # the operator's own command, without a shell
            list(action.command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(json.dumps(alert).encode(), timeout=action.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            for pipe in (process.stdin, process.stdout):  # not read to the end: a child in another group may hold it
                if pipe is not None:
                    pipe.close()
            process.wait(_KILL_S)
            raise UsageError(f"{action.command[0]} did not end within {action.timeout_s:g} s.") from None
        said = output.decode("utf-8", "replace").strip()[-_MOST_OUTPUT:]
        if process.returncode:
            raise UsageError(f"{action.command[0]} ended with {process.returncode}: {said}")
        return said or "it ended with 0"

    def _end(self, record: ActionRecord, state: ActionState, outcome: str, now_s: float) -> None:
        self._records.end(record.key, state, outcome, now_s)
        self._count(record, state, outcome)

    def _count(self, record: ActionRecord, state: ActionState, outcome: str) -> None:
        self.counts[record.kind, state] += 1
        extra = {"alert": record.alert, "kind": record.kind, "object": record.object, "outcome": outcome}
        log.info("action " + state, extra=extra)
        try:
            self._client().note_action(record, state, outcome)
        except RaytideError as error:  # the log of actions has it
            log.warning("an action is not in the audit log", extra={"key": record.key, "error": str(error)})


def _words(due: DueAction, plan: Mapping[str, Any]) -> str:
    target = f" to revision {plan['revision']}" if plan.get("revision") else ""
    words = " ".join(due.action.command) if due.action.command else due.action.url or due.object
    return f"{due.action.do} {words}{target}"
