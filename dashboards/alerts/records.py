"""Alerts, actions, silences and messages in a SQLite file that the monitor and the API share.

A restarted monitor continues from this file. The file's size is bounded: old state changes, actions and messages are
deleted.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from raytide.core.errors import QuotaError
from raytide.core.io.atomic_file import read_json
from raytide.core.telemetry.settings import ActionKind
from raytide.dashboards.alerts.states import Alert, AlertSource, AlertState
from raytide.gateway.files.database import FileDatabase

FILE = "alerts.sqlite"
"""The file's name in the run folder."""
MOST_ALERTS = 5000
"""The most alerts of one source. At this number, a new alert makes all resolved ones be deleted. If there are still as
many, the new alert is dropped. It is also the most silences.
"""

_KEPT_S = 30 * 86_400.0
_MOST_ROWS = 20_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS alerts (
    source TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL, labels TEXT NOT NULL, severity TEXT NOT NULL,
    state TEXT NOT NULL, since_s REAL NOT NULL, fired_at_s REAL, value REAL, summary TEXT NOT NULL, page TEXT NOT NULL,
    PRIMARY KEY (source, id)
);
CREATE TABLE IF NOT EXISTS episodes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, source TEXT NOT NULL, name TEXT NOT NULL,
    labels TEXT NOT NULL, state TEXT NOT NULL, value REAL, summary TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS actions (
    key TEXT PRIMARY KEY, at_s REAL NOT NULL, ended_at_s REAL, alert TEXT NOT NULL, kind TEXT NOT NULL,
    entry TEXT NOT NULL, object TEXT NOT NULL, state TEXT NOT NULL, plan TEXT NOT NULL, outcome TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS silences (
    name TEXT PRIMARY KEY, until_s REAL NOT NULL, user TEXT NOT NULL, at_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS messages (
    receiver TEXT NOT NULL, source TEXT NOT NULL, id TEXT NOT NULL, episode TEXT NOT NULL, state TEXT NOT NULL,
    at_s REAL NOT NULL, PRIMARY KEY (receiver, source, id)
);
CREATE TABLE IF NOT EXISTS sent (receiver TEXT NOT NULL, at_s REAL NOT NULL);
"""

ActionState = Literal["held", "started", "done", "failed", "interrupted", "dry_run"]


@dataclass(frozen=True, slots=True)
class Episode:
    """A change of an alert's state."""

    at_s: float
    name: str
    labels: Mapping[str, str]
    state: AlertState
    value: float | None
    summary: str
    source: AlertSource


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """An action in the log. Its key combines the alert's episode and the action's entry in cluster.yaml.

    There is at most one record per key, so an entry acts only once per episode.
    """

    key: str
    at_s: float
    alert: str
    kind: ActionKind
    entry: str
    """The identity of the action's entry in cluster.yaml; cool-down and rate limit apply to each entry."""
    object: str
    state: ActionState
    plan: Mapping[str, Any]
    """The decisions that were made before the action began; an interrupted action continues with them."""
    outcome: str = ""
    ended_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Silence:
    """A silence: until `until_s`, alerts of this name start no actions and send no messages."""

    name: str
    until_s: float
    user: str
    at_s: float


def acting_source(run_dir: Path) -> AlertSource:
    """Returns the source whose alerts start actions and send messages. It is Alertmanager if the cluster runs one, else
    raytide.

    Only one source acts, so that no alert acts twice.
    """
    try:
        record = read_json(run_dir / "cluster.json") or {}
    except ValueError:
        record = {}
    return "alertmanager" if record.get("monitoring") else "raytide"


class AlertRecords:
    """The records of one cluster's alerts, actions, silences and messages. Every thread and process may call it.

    Each call opens the file. A damaged file is renamed, and a new file is begun.
    """

    def __init__(self, path: Path) -> None:
        self._database = FileDatabase(path.parent, path.name, _SCHEMA)

    def alerts(self, source: AlertSource | None = None) -> list[Alert]:
        """Returns all alerts, the most recently changed first."""
        with self._database.read() as c:
            rows = c.execute("SELECT * FROM alerts ORDER BY since_s DESC, id").fetchall()
        return [_alert(row) for row in rows if source in (None, row["source"])]

    def save(self, changed: Iterable[Alert], now_s: float) -> None:
        """Stores alerts and records their changes of state. Deletes an alert that ends before it has fired."""
        with self._database.write() as c:
            for alert in changed:
                key = (alert.source, alert.id)
                before = c.execute("SELECT state, fired_at_s FROM alerts WHERE source = ? AND id = ?", key).fetchone()
                if alert.state is AlertState.RESOLVED:
                    if before is None:
                        continue
                    if before["fired_at_s"] is None:
                        c.execute("DELETE FROM alerts WHERE source = ? AND id = ?", key)
                        continue
                    alert = replace(alert, fired_at_s=before["fired_at_s"])
                elif before is None and self._count(c, alert.source) >= MOST_ALERTS:
                    continue
                named = (*key, alert.name, json.dumps(alert.labels), alert.severity, alert.state)
                rest = (alert.since_s, alert.fired_at_s, alert.value, alert.summary, alert.page)
                c.execute("INSERT OR REPLACE INTO alerts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*named, *rest))
                if before is None or before["state"] != alert.state or before["fired_at_s"] != alert.fired_at_s:
                    noted = (now_s, alert.source, alert.name, json.dumps(dict(alert.labels)), alert.state)
                    insert = "INSERT INTO episodes (at_s, source, name, labels, state, value, summary)"
                    c.execute(f"{insert} VALUES (?, ?, ?, ?, ?, ?, ?)", (*noted, alert.value, alert.summary))

    def _count(self, c: sqlite3.Connection, source: AlertSource) -> int:
        """Returns the number of a source's alerts. If there are too many, it deletes the resolved ones first."""
        count = "SELECT count(*) FROM alerts WHERE source = ?"
        if (found := int(c.execute(count, (source,)).fetchone()[0])) >= MOST_ALERTS:
            c.execute("DELETE FROM alerts WHERE source = ? AND state = 'resolved'", (source,))
            found = int(c.execute(count, (source,)).fetchone()[0])
        return found

    def episodes(self, limit: int = 100, name: str | None = None) -> list[Episode]:
        """Returns the latest state changes of alerts, newest first. `name` selects the alerts with this name."""
        with self._database.read() as c:
            query = "SELECT * FROM episodes WHERE name = coalesce(?, name) ORDER BY seq DESC LIMIT ?"
            return [_episode(row) for row in c.execute(query, (name, limit))]

    def actions(self, limit: int = 1000, *, with_held: bool = True) -> list[ActionRecord]:
        """Returns the log of actions, newest first. Without `with_held`, delayed actions are left out."""
        query = "SELECT * FROM actions WHERE ? OR state != 'held' ORDER BY at_s DESC LIMIT ?"
        with self._database.read() as c:
            return [_action(row) for row in c.execute(query, (with_held, limit))]

    def begin(self, action: ActionRecord) -> bool:
        """Records an action before it is run. Returns False if the action was begun before and must not be run again.

        If the action was delayed before, this record replaces the record of the delay. If the action is still delayed,
        nothing is written.
        """
        with self._database.write() as c:
            row = c.execute("SELECT state FROM actions WHERE key = ?", (action.key,)).fetchone()
            if row is not None and row["state"] != "held":
                return False
            if row is not None and action.state == "held":  # a changed file would make the monitor act at once again
                return True
            named = (action.key, action.at_s, action.ended_at_s, action.alert, action.kind, action.entry)
            rest = (action.object, action.state, json.dumps(action.plan), action.outcome)
            c.execute("INSERT OR REPLACE INTO actions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*named, *rest))
            return True

    def end(self, key: str, state: ActionState, outcome: str, now_s: float) -> None:
        with self._database.write() as c:
            change = "UPDATE actions SET state = ?, outcome = ?, ended_at_s = ? WHERE key = ?"
            c.execute(change, (state, outcome[:2000], now_s, key))

    def silences(self, now_s: float) -> list[Silence]:
        with self._database.read() as c:
            found = c.execute("SELECT * FROM silences WHERE until_s > ? ORDER BY name", (now_s,))
            return [Silence(**dict(row)) for row in found]

    def silence(self, silence: Silence) -> None:
        """Silences the alerts of one name until `until_s`. A past `until_s` lifts an earlier silence of this name."""
        with self._database.write() as c:
            c.execute("DELETE FROM silences WHERE until_s <= ? OR name = ?", (silence.at_s, silence.name))
            if silence.until_s > silence.at_s:
                if int(c.execute("SELECT count(*) FROM silences").fetchone()[0]) >= MOST_ALERTS:
                    raise QuotaError(
                        "there are too many silences.", hint="Lift some: `raytide alerts silence NAME --lift`."
                    )
                values = (silence.name, silence.until_s, silence.user, silence.at_s)
                c.execute("INSERT INTO silences VALUES (?, ?, ?, ?)", values)

    def told(self, receiver: str) -> dict[tuple[str, str], tuple[str, str, float]]:
        """Returns the last message to a receiver about each alert.

        The result maps an alert's (source, id) to the (episode, state, time) of the message.
        """
        with self._database.read() as c:
            rows = c.execute("SELECT * FROM messages WHERE receiver = ?", (receiver,)).fetchall()
        return {(row["source"], row["id"]): (row["episode"], row["state"], row["at_s"]) for row in rows}

    def sent_between(self, receiver: str, since_s: float, until_s: float) -> int:
        with self._database.read() as c:
            query = "SELECT count(*) FROM sent WHERE receiver = ? AND at_s >= ? AND at_s <= ?"
            return int(c.execute(query, (receiver, since_s, until_s)).fetchone()[0])

    def note_sent(self, receiver: str, alerts: Iterable[Alert], now_s: float) -> None:
        with self._database.write() as c:
            c.execute("INSERT INTO sent VALUES (?, ?)", (receiver, now_s))
            rows = [(receiver, a.source, a.id, a.episode, a.state, now_s) for a in alerts]
            c.executemany("INSERT OR REPLACE INTO messages VALUES (?, ?, ?, ?, ?, ?)", rows)

    def prune(self, now_s: float) -> None:
        """Deletes records that are too old, and the oldest records if there are too many. An action of an alert that
        still fires stays, because it would be done once more.
        """
        old_s = now_s - _KEPT_S
        with self._database.write() as c:
            c.execute("DELETE FROM alerts WHERE state = 'resolved' AND since_s < ?", (old_s,))
            c.execute("DELETE FROM messages WHERE at_s < ?", (old_s,))
            c.execute("DELETE FROM sent WHERE at_s < ?", (now_s - 7200.0,))
            last = c.execute("SELECT max(seq) FROM episodes").fetchone()[0] or 0
            c.execute("DELETE FROM episodes WHERE at_s < ? OR seq <= ?", (old_s, last - _MOST_ROWS))
            fires = "SELECT 1 FROM alerts WHERE state = 'firing' AND actions.key LIKE alerts.id || '-%'"
            c.execute(f"DELETE FROM actions WHERE at_s < ? AND NOT EXISTS ({fires})", (old_s,))  # nosec B608
            newest = "DELETE FROM actions WHERE key NOT IN (SELECT key FROM actions ORDER BY at_s DESC LIMIT ?)"
            c.execute(newest, (_MOST_ROWS,))


def _alert(row: sqlite3.Row) -> Alert:
    fields = dict(row)
    del fields["id"]  # it follows from the name and the labels
    labels = tuple((key, value) for key, value in json.loads(row["labels"]))
    return Alert(**{**fields, "labels": labels, "state": AlertState(row["state"])})


def _episode(row: sqlite3.Row) -> Episode:
    fields = dict(row)
    del fields["seq"]
    return Episode(**{**fields, "labels": json.loads(row["labels"]), "state": AlertState(row["state"])})


def _action(row: sqlite3.Row) -> ActionRecord:
    return ActionRecord(**{**dict(row), "plan": json.loads(row["plan"])})
