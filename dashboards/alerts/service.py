"""The API's operations on metrics history, alerts and orders, without HTTP."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from raytide.autoscaler.providers.hosts.quarantine import HostQuarantine, quarantine_folder
from raytide.control.api.auth import Caller
from raytide.core.clock import Clock
from raytide.core.config import Config
from raytide.core.errors import NotFoundError
from raytide.core.io.atomic_file import read_json
from raytide.core.objects.hardware.host import HostsSection
from raytide.core.specs.order import Order, OrderSpec
from raytide.core.state import Store
from raytide.core.telemetry.settings import AlertName, Severity
from raytide.dashboards.alerts.payload import alerts_from_payload
from raytide.dashboards.alerts.records import (
    FILE,
    ActionRecord,
    AlertRecords,
    Episode,
    Silence,
    acting_source,
)
from raytide.dashboards.alerts.states import TEST_LABEL, Alert, AlertState
from raytide.dashboards.history.points import label_set
from raytide.dashboards.history.reader import Curve, HistoryReader
from raytide.dashboards.history.writer import FILE as HISTORY_FILE

PROBES_FILE, ANOMALIES_FILE = "probes.json", "anomalies.json"
"""The files of the run folder in which the monitor keeps the last results of probes and the last scores of signals."""
_MOST_SILENCE_S = 30 * 86_400.0


class SilenceRequest(Config):
    name: AlertName
    for_s: float = Field(ge=0, le=_MOST_SILENCE_S)
    """The seconds of silence; 0 lifts a silence."""


class AlertTest(Config):
    name: AlertName
    severity: Severity = "critical"
    labels: dict[str, str] = Field(default_factory=dict, max_length=32)


class ActionNote(Config):
    """An audit log entry about the end of an action."""

    alert: str
    kind: str
    object: str
    key: str
    state: str
    outcome: str = ""


class MonitoringService:
    """Answers requests to the API about metrics history and alerts. The monitor writes the data into files in the run
    folder, which the API reads.
    """

    def __init__(self, run_dir: Path, store: Store, clock: Clock, hosts: HostsSection | None = None) -> None:
        self._run_dir, self._store, self._clock = run_dir, store, clock
        self._hosts = {host.name for host in hosts.machines} if hosts is not None else set()
        self._history = HistoryReader(run_dir / HISTORY_FILE)
        self._records: AlertRecords | None = None

    @property
    def _alerts(self) -> AlertRecords:
        if self._records is None:
            self._records = AlertRecords(self._run_dir / FILE)
        return self._records

    def history(
        self,
        metric: str,
        where: Mapping[str, str],
        since_s: float,
        step_s: float,
        *,
        is_rate: bool,
        quantile: float | None,
        by: Collection[str] | None,
    ) -> list[Curve]:
        """Returns the curves of a metric over the last `since_s` seconds."""
        now_s = self._clock.now_s()
        return self._history.query(
            metric, where, now_s - since_s, now_s, step_s, is_rate=is_rate, quantile=quantile, by=by
        )

    def metrics(self) -> tuple[str, ...]:
        return self._history.metrics()

    def alerts(self, caller: Caller) -> list[dict[str, Any]]:
        """Returns the alerts of the acting source (see `acting_source`). Firing alerts come first. Each alert has its
        last action.
        """
        source = acting_source(self._run_dir)
        actions: dict[str, ActionRecord] = {}
        for record in self._alerts.actions():
            actions.setdefault(record.key.rpartition("-")[0], record)
        silenced = {silence.name for silence in self._alerts.silences(self._clock.now_s())}
        order = {AlertState.FIRING: 0, AlertState.PENDING: 1, AlertState.RESOLVED: 2}
        found = [alert for alert in self._alerts.alerts(source) if _sees(caller, dict(alert.labels))]
        return [
            _alert_json(alert, actions.get(alert.episode), alert.name in silenced)
            for alert in sorted(found, key=lambda alert: (order[alert.state], -alert.since_s))
        ]

    def episodes(self, caller: Caller, limit: int, name: str | None) -> list[Episode]:
        return [each for each in self._alerts.episodes(limit, name) if _sees(caller, each.labels)]

    def actions(self, caller: Caller, limit: int) -> list[ActionRecord]:
        caller.require_all()
        return self._alerts.actions(limit)

    def note_action(self, body: Mapping[str, object], caller: Caller) -> None:
        """Writes the end of an action into the audit log."""
        caller.require_person().require_all()
        note = ActionNote.parse(body, where="action")
        self._store.orders.note(f"alert.{note.kind}", note.object, note.model_dump(exclude={"kind", "object"}))

    def receive(self, body: Mapping[str, Any], caller: Caller) -> int:
        """Stores the alerts of a message from Alertmanager and returns their number."""
        caller.require_person().require_all()
        now_s = self._clock.now_s()
        found = alerts_from_payload(body, now_s)
        self._alerts.save(found, now_s)
        return len(found)

    def silence(self, body: Mapping[str, object], caller: Caller) -> Silence:
        caller.require_person().require_all()
        asked, now_s = SilenceRequest.parse(body, where="silence"), self._clock.now_s()
        silence = Silence(asked.name, now_s + asked.for_s, caller.user, now_s)
        self._alerts.silence(silence)
        self._store.orders.note("alert.silence", asked.name, {"for_s": asked.for_s})
        return silence

    def silences(self) -> list[Silence]:
        return self._alerts.silences(self._clock.now_s())

    def test(self, body: Mapping[str, object], caller: Caller) -> dict[str, Any]:
        """Fires a test alert for a minute. Receivers get messages about it. Its actions are dry runs."""
        caller.require_person().require_all()
        asked, now_s = AlertTest.parse(body, where="test"), self._clock.now_s()
        labels = label_set({**asked.labels, TEST_LABEL: "true"})
        alert = Alert(
            name=asked.name,
            labels=labels,
            severity=asked.severity,
            state=AlertState.FIRING,
            since_s=now_s,
            fired_at_s=now_s,
            summary=f"a test by {caller.user}",
            source=acting_source(self._run_dir),
        )
        self._alerts.save([alert], now_s)
        self._store.orders.note("alert.test", asked.name, {"labels": asked.labels})
        return _alert_json(alert, None, is_silenced=False)

    def order(self, body: Mapping[str, object], caller: Caller) -> Order:
        """Records an order to the controller. A repeated order with the same id has no effect.

        The caller needs a token for all teams. To restart a replica, a token of the replica's team suffices.
        """
        spec = OrderSpec.parse(body, where="order")
        if spec.kind == "restart_replica":
            endpoint = self._store.endpoint(spec.subject)
            caller.require_person().require_team(endpoint.spec.team)
        elif spec.kind == "resume":
            caller.require_person().require_all()
            if self._store.orders.hold() is None:
                raise NotFoundError("the cluster is not on hold.", hint="Only a restored cluster is.")
        else:
            caller.require_person().require_all()
            if spec.subject not in {node.id for node in self._store.nodes(live=True)}:
                if (done := self._order_of_host(spec, caller)) is not None:
                    return done
                raise NotFoundError(f"there is no node {spec.subject}.", hint="`raytide status` lists the nodes.")
        return self._store.orders.add(spec, caller.user, self._clock.now_s())

    def _order_of_host(self, spec: OrderSpec, caller: Caller) -> Order | None:
        """Puts one of the operator's own machines into quarantine, or lifts its quarantine, at once. Returns None for
        orders of other kinds or about other names.
        """
        if spec.subject not in self._hosts or spec.kind not in ("quarantine_node", "release_node"):
            return None
        now_s, quarantine = self._clock.now_s(), HostQuarantine(quarantine_folder(self._run_dir), self._clock)
        if spec.kind == "release_node":
            outcome = "it may be a node again" if quarantine.lift(spec.subject) else "it was not in quarantine"
        else:
            quarantine.add(spec.subject, f"{spec.reason or f'asked for by {caller.user}'}.", is_until_lifted=True)
            outcome = "it gets no further node; `raytide nodes replace NODE` ends one that it has"
        self._store.orders.note(f"host.{spec.kind.removesuffix('_node')}", spec.subject, {"reason": spec.reason})
        return Order(spec.id, spec.kind, spec.subject, "", spec.reason, caller.user, now_s, now_s, outcome)

    def find_order(self, id: str, caller: Caller) -> Order:
        caller.require_all()
        return self._store.orders.get(id)

    def probes(self) -> list[dict[str, Any]]:
        """Returns the result of each probe's last request."""
        return self._listed(PROBES_FILE, "probes")

    def anomalies(self) -> list[dict[str, Any]]:
        """Returns the last anomaly score of each signal, with the median, the deviation and the number of values behind
        the score.
        """
        return self._listed(ANOMALIES_FILE, "signals")

    def _listed(self, file: str, name: str) -> list[dict[str, Any]]:
        try:
            found = (read_json(self._run_dir / file) or {}).get(name, [])
        except ValueError:
            return []
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _sees(caller: Caller, labels: Mapping[str, str]) -> bool:
    return "team" not in labels or caller.sees(labels["team"])


def _alert_json(alert: Alert, action: ActionRecord | None, is_silenced: bool) -> dict[str, Any]:
    shown = None if action is None else {"do": action.kind, "state": action.state, "outcome": action.outcome}
    return {
        "name": alert.name,
        "severity": alert.severity,
        "state": str(alert.state),
        "labels": dict(alert.labels),
        "since_s": alert.since_s,
        "value": alert.value,
        "summary": alert.summary,
        "page": alert.page,
        "action": shown,
        "silenced": is_silenced,
        "source": alert.source,
    }
